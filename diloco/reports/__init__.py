# SPDX-License-Identifier: Apache-2.0
"""Pages of what was trained: real runs, and sweeps of the lab."""
