# SPDX-License-Identifier: Apache-2.0
"""Many learners with real gradients in one process, on a simulated clock."""
