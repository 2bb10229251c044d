# SPDX-License-Identifier: Apache-2.0
"""Runs programs of the back ends; a failure names the command and its words.

Nothing here goes through a shell: an argument is an argument.
"""

import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence

Run = Callable[[Sequence[str]], str]  # argv -> what it printed.


class CommandFailed(Exception):
  """A program is missing, or ended with another code than 0."""

  def __init__(self, argv: Sequence[str], reason: str, stderr: str = ''):
    self.argv = tuple(argv)
    self.stderr = stderr.strip()
    lines = [f'{shlex.join(argv)}: {reason}', *self.stderr.splitlines()]
    super().__init__('\n  '.join(lines))


def run(argv: Sequence[str], text: str = '') -> str:
  """Runs a command and returns its output; `text` is its standard input.

  Raises:
    CommandFailed: the program does not exist, or it failed.
  """
  if shutil.which(argv[0]) is None:
    raise CommandFailed(argv, f'there is no program {argv[0]!r} on the PATH')
  ended = subprocess.run(
    list(argv), input=text, capture_output=True, text=True, check=False
  )
  if ended.returncode != 0:
    raise CommandFailed(argv, f'exit code {ended.returncode}', ended.stderr)
  return ended.stdout
