# SPDX-License-Identifier: Apache-2.0
"""Moves messages and bytes between learners and syncer."""
