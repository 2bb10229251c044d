# SPDX-License-Identifier: Apache-2.0
"""Outputs of a run: scalars, status, summary, goodput."""
