# SPDX-License-Identifier: Apache-2.0
"""Configurations of runs, one file each; see README.md for the table."""
