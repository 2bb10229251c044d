# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: state that a process writes for a later one."""
