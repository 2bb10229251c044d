# SPDX-License-Identifier: Apache-2.0
"""Exit codes of the roles, as all engines read them."""

EXIT_CONFIG = 78  # The same configuration would fail again.
EXIT_USAGE = 64  # So would the same command line.
EXITS_FATAL = (EXIT_USAGE, EXIT_CONFIG)  # All others but 0 are tried again.
EXIT_STOPPED = 143  # 128 + SIGTERM: it left within its notice.
