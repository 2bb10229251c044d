# SPDX-License-Identifier: Apache-2.0
"""Drivers of the real protocol machines under a simulated clock."""
