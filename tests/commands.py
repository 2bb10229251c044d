# SPDX-License-Identifier: Apache-2.0
"""Commands as users start them: in processes of their own, to their end."""

import os
import pathlib
import subprocess
import sys

import psutil

from tests.repository.tree import ROOT

DEADLINE_S = 500.0  # On a machine that others work on too.
EXIT_CONFIG = 78


def python(
  *words: object,
  cwd: pathlib.Path = ROOT,
  timeout: float = DEADLINE_S,
  **environment: str,
) -> subprocess.CompletedProcess[str]:
  """Runs Python with these words, such as '-m', 'diloco.lab'."""
  return subprocess.run(
    [sys.executable, *map(str, words)],
    cwd=cwd,
    env=os.environ | environment,
    capture_output=True,
    text=True,
    timeout=timeout,
  )


def listening(pid: int) -> list[str]:
  """The addresses at which a process listens by TCP, such as '127.0.0.1:80'."""
  return sorted(
    f'{each.laddr.ip.removeprefix("::ffff:")}:{each.laddr.port}'
    for each in psutil.Process(pid).net_connections('tcp')
    if each.status == psutil.CONN_LISTEN
  )


def output(*words: object, **how) -> str:
  """Returns the standard output of what must succeed; see `python`."""
  done = python(*words, **how)
  assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
  return done.stdout


def refused(*words: object, **how) -> list[str]:
  """Returns the lines that say why a command can not run as configured."""
  done = python(*words, **how)
  assert (done.returncode, done.stdout) == (EXIT_CONFIG, ''), done
  return done.stderr.splitlines()
