# SPDX-License-Identifier: Apache-2.0
"""Exit codes of the roles, as all back ends read them."""

EXIT_CONFIG = 78  # The same configuration would fail again.
EXIT_USAGE = 64  # So would the same command line.
EXIT_CUT_OFF = 69  # A learner has made all steps, and found no syncer.
# All others but 0 are tried again.
EXITS_FATAL = (EXIT_USAGE, EXIT_CUT_OFF, EXIT_CONFIG)
EXIT_STOPPED = 143  # 128 + SIGTERM: it left within its notice.
