# SPDX-License-Identifier: Apache-2.0
"""Runs the real protocol machines under a simulated clock."""
