#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv-test, then runs ruff and pytest; arguments go to pytest:
#   PYTHON=python3.12 bash tests/run.sh -k codec
# With --foreign it makes .venv-foreign, which has a trainer of others (4 GB), and
# runs only the test of a learner around that.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck source=launch/environment.sh
source launch/environment.sh
if [[ "${1:-}" == --foreign ]]; then
  make_environment .venv-foreign '.[foreign]'
  exec .venv-foreign/bin/python -m pytest -m foreign -rP "${@:2}" \
    tests/processes/test_process_own_loops.py
fi
make_environment .venv-test '.[dev]'

# Hundreds of processes import these. Where PYTHONDONTWRITEBYTECODE is set each
# would compile them, for a third of a second.
.venv-test/bin/python -m compileall -q diloco launch experiments tests

# Most of the time goes into compiling, often the same again: what one test or
# process has compiled, the others take; those of another run do not.
scratch=$(mktemp -d)
export JAX_COMPILATION_CACHE_DIR=$scratch/compiled
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export DILOCO_TEST_RECORD=$scratch/record.jsonl
touch "$DILOCO_TEST_RECORD"

# Whatever happens, the last lines say what it took and what failed.
summarize() {
  times >"$scratch/times"
  echo "wall time, with the installation: $((SECONDS / 60)) min $((SECONDS % 60)) s"
  echo "CPU time, user and system: $(tail -n 1 "$scratch/times")"
  .venv-test/bin/python -m tests.summary "$DILOCO_TEST_RECORD" || true
  rm -rf "$scratch"
}
trap summarize EXIT

FAILED=1 NONE_COLLECTED=5
worst=$NONE_COLLECTED
run_part() {
  local status=0
  .venv-test/bin/python -m pytest "--part=$@" || status=$?
  case "$status" in
    0) ((worst == FAILED)) || worst=0 ;;
    "$FAILED") worst=$FAILED ;;
    "$NONE_COLLECTED") ;;  # What was asked for is all in the other part.
    *) exit "$status" ;;
  esac
}

.venv-test/bin/python -m ruff check .
# A file stays with one worker, so that its fixtures are made once. Three of
# them keep two cores busy: tests of processes wait much of their time.
# Half of what there is to compile is what LLVM makes of it; the other part's
# programs are compiled as those of users are.
JAX_DISABLE_MOST_OPTIMIZATIONS=1 \
  run_part together -n 3 --dist=loadfile --no-loadscope-reorder "$@"
# Tests with clocks, ports and processes of their own; the slowest come last.
run_part alone "$@"
exit "$worst"
