# SPDX-License-Identifier: Apache-2.0
"""Log lines of a process: all of this package, and the libraries' warnings.

They are text for humans, or JSON lines for collectors such as Cloud Logging.
What C++ libraries write to stderr themselves, such as XLA when it aborts, stays
text.
"""

import atexit
import datetime
import functools
import io
import json
import logging
import os
import pathlib
import sys
import threading

from absl import logging as absl_logging

ORBAX = '/orbax/checkpoint/'  # Part of the path of its files.
# Not just '/diloco/': a checkout of that name has its environment inside.
_PACKAGE = pathlib.Path(__file__).parents[1]
OURS = tuple(
  f'{each}{os.sep}' for each in (_PACKAGE, _PACKAGE.with_name('launch'))
)
ERROR = 'error: '  # Starts the line that a main prints before it fails.
# Cloud Logging's names, from the highest level down.
SEVERITIES = (
  (logging.CRITICAL, 'CRITICAL'),
  (logging.ERROR, 'ERROR'),
  (logging.WARNING, 'WARNING'),
  (logging.INFO, 'INFO'),
)

_labels: dict[str, str | int] = {}  # Included in every JSON record.


def keep_ours(run: str = '', **labels: int) -> None:
  """Drops what other packages log below a warning, and all of Orbax's lines.

  Args:
    run: the run's name, added to every later JSON record.
    **labels: further labels that identify the process, such as learner=3.
  """
  if run:
    _labels['run'] = run
  _labels.update(labels)
  handler = absl_logging.get_absl_handler()
  handler.addFilter(_is_ours_or_grave)


def write_json(role: str) -> None:
  """Makes everything that Python writes to stderr a JSON record from here on.

  Each is one line: `time`, `severity`, `message`, the role, and the labels of
  `keep_ours` as soon as they are known. A traceback is part of its message.
  Printed messages are records too, so that a process that ends because of an
  unknown flag reports it in the same way.

  Args:
    role: the process's role, such as 'syncer'.
  """
  _labels['role'] = role
  # Installing it removes handlers left by imports. It cannot write the records
  # itself: before flags are parsed it writes to whatever sys.stderr is.
  absl_logging.use_absl_handler()
  absl_logging.get_absl_handler().addFilter(lambda record: False)
  handler = logging.StreamHandler(sys.stderr)
  handler.setFormatter(JsonLine())
  handler.addFilter(_is_ours_or_grave)
  logging.root.addHandler(handler)
  logging.captureWarnings(True)
  sys.stderr = PrintedLines(handler)
  atexit.register(sys.stderr.end)
  sys.excepthook = functools.partial(_on_exception, handler)
  threading.excepthook = functools.partial(_on_exception_of_thread, handler)


class JsonLine(logging.Formatter):
  """Formats a record as one line of JSON."""

  def format(self, record: logging.LogRecord) -> str:
    levels = (name for level, name in SEVERITIES if record.levelno >= level)
    made_at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    message = record.getMessage()
    if record.exc_info:
      message = f'{message}\n{self.formatException(record.exc_info)}'
    if record.stack_info:
      message = f'{message}\n{record.stack_info}'
    fields = {
      'time': made_at.isoformat(timespec='microseconds'),
      'severity': next(levels, 'DEBUG'),
      'message': message,
      **_labels,
    }
    return json.dumps(fields)


class PrintedLines(io.TextIOBase):
  """Replaces stderr: every line that is printed becomes a record."""

  def __init__(self, handler: logging.StreamHandler):
    self._handler = handler
    self._lock = threading.Lock()
    self._begun = ''  # A line that is not ended yet.

  def fileno(self) -> int:
    return self._handler.stream.fileno()

  def writable(self) -> bool:
    return True

  def write(self, text: str) -> int:
    with self._lock:
      *lines, self._begun = (self._begun + text).split('\n')
    for line in filter(str.strip, lines):
      level = logging.ERROR if line.startswith(ERROR) else logging.INFO
      _record(self._handler, level, line.removeprefix(ERROR))
    return len(text)

  def end(self) -> None:
    """Writes out a line that was printed without a line end."""
    if self._begun:
      self.write('\n')


def _record(handler, level: int, message: str, exception=None) -> None:
  """Writes a record without a logger: before flags, loggers drop most."""
  handler.handle(
    logging.LogRecord('diloco', level, __file__, 0, message, None, exception)
  )


def _on_exception(handler, kind, error, traceback) -> None:
  exception = (kind, error, traceback)
  _record(handler, logging.CRITICAL, 'uncaught exception', exception)


def _on_exception_of_thread(handler, caught: threading.ExceptHookArgs) -> None:
  name = caught.thread.name if caught.thread else 'unknown'
  _record(
    handler,
    logging.CRITICAL,
    f'uncaught exception in thread {name}',
    (caught.exc_type, caught.exc_value, caught.exc_traceback),
  )


def _is_ours_or_grave(record: logging.LogRecord) -> bool:
  if ORBAX in record.pathname:
    # One failed save logs up to six tracebacks; checkpoint/ says it in a line.
    return False
  if record.pathname.startswith(OURS):
    return True
  forgotten = record.name == 'asyncio' and ORBAX in record.getMessage()
  return record.levelno >= logging.WARNING and not forgotten
