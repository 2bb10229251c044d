# SPDX-License-Identifier: Apache-2.0
"""Configurations of runs, one file each; README.md beside them has the table.

"The paper" is *Decoupled DiLoCo for Resilient Distributed Pre-training*, arXiv
2604.21428.
"""
