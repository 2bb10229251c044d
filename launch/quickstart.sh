#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv, installs, and trains with 1 syncer and 3 learners, one of which
# is killed on the way; then draws text from the model. More flags are passed on
# to launch/train.py:
#   bash launch/quickstart.sh --config.protocol.total_steps=1000
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck source=launch/environment.sh
source launch/environment.sh
make_environment .venv '.[plot]'

workdir="runs/quickstart-$(date +%Y%m%d-%H%M%S)"
echo "Training in $workdir; Ctrl-C stops it."
exec .venv/bin/python -m launch.train --config=experiments/quickstart.py \
  --workdir="$workdir" "$@"
