#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv-test, then runs ruff and pytest; arguments go to pytest:
#   PYTHON=python3.12 bash tests/run.sh -k codec
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck source=launch/environment.sh
source launch/environment.sh
make_environment .venv-test '.[dev]'

.venv-test/bin/python -m ruff check .
.venv-test/bin/python -m pytest "$@"
