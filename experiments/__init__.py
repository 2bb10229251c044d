# SPDX-License-Identifier: Apache-2.0
"""Configurations of runs, one file each; README.md beside them has the table.

Most start from `common`: all keys of a run, or of a simulation, with their
defaults.

"The paper" is *Decoupled DiLoCo for Resilient Distributed Pre-training*, arXiv
2604.21428.
"""

import sys

# Installed, this is diloco.experiments; its modules are named as in a checkout.
sys.modules.setdefault('experiments', sys.modules[__name__])
