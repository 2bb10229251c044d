# SPDX-License-Identifier: Apache-2.0
"""Which log lines a process writes: all of ours, the libraries' warnings."""

import logging

from absl import logging as absl_logging

ORBAX = '/orbax/checkpoint/'  # In the paths of its files.


def keep_ours() -> None:
  """Drops what other packages say below a warning, and all of Orbax's."""
  handler = absl_logging.get_absl_handler()
  handler.addFilter(_is_ours_or_grave)


def _is_ours_or_grave(record: logging.LogRecord) -> bool:
  if ORBAX in record.pathname:
    # Up to six tracebacks where one save fails; checkpoint/ says it in a line.
    return False
  if '/diloco/' in record.pathname:
    return True
  forgotten = record.name == 'asyncio' and ORBAX in record.getMessage()
  return record.levelno >= logging.WARNING and not forgotten
