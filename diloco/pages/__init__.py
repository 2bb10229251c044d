# SPDX-License-Identifier: Apache-2.0
"""What people look at: tables in the terminal, plots, self-contained pages."""
