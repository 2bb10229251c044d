# SPDX-License-Identifier: Apache-2.0
"""Output for humans: tables in the terminal, plots, self-contained pages."""
