# SPDX-License-Identifier: Apache-2.0
"""Which log lines a process writes: all of ours, the libraries' warnings."""

import logging

from absl import logging as absl_logging


def keep_ours() -> None:
  """Drops what other packages have to say below a warning."""
  handler = absl_logging.get_absl_handler()
  handler.addFilter(_is_ours_or_grave)


def _is_ours_or_grave(record: logging.LogRecord) -> bool:
  return record.levelno >= logging.WARNING or '/diloco/' in record.pathname
