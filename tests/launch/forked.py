# SPDX-License-Identifier: Apache-2.0
"""Runs many commands as `python -m` does, in forks of one process.

What they import is imported once, which is most of what each of them takes.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[2]
SERVE = """
import importlib, json, os, runpy, sys
modules, calls, folder = json.load(sys.stdin)
for module in modules:
  importlib.import_module(module)
codes = []
for i, (module, *words) in enumerate(calls):
  if not (child := os.fork()):
    for number in (1, 2):
      with open(f'{folder}/{i}.{number}', 'w') as file:
        os.dup2(file.fileno(), number)
    sys.argv = [module, *words]
    runpy.run_module(module, run_name='__main__', alter_sys=True)
    sys.exit(0)
  codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(json.dumps(codes))
"""


@dataclasses.dataclass(frozen=True)
class Ended:
  """What came of one command."""

  code: int
  out: str
  err: str


def run_all(
  calls: Sequence[Sequence[str]],
  imports: Sequence[str] = ('launch.backends', 'launch.local'),
  cwd: pathlib.Path = ROOT,
  **environment: str,
) -> list[Ended]:
  """Runs each of (module, argument, …); returns what came of them.

  Args:
    imports: modules that are imported beforehand.
  """
  given = os.environ | {'PYTHONPATH': str(ROOT)} | environment
  with tempfile.TemporaryDirectory() as folder:
    done = subprocess.run(
      [sys.executable, '-W', 'ignore::RuntimeWarning', '-c', SERVE],
      input=json.dumps((imports, calls, folder)),
      cwd=cwd,
      env=given,
      stdout=subprocess.PIPE,
      text=True,
      check=True,
      timeout=600,
    )
    texts = [
      [pathlib.Path(f'{folder}/{i}.{n}').read_text() for n in (1, 2)]
      for i in range(len(calls))
    ]
  codes = json.loads(done.stdout.splitlines()[-1])
  return [Ended(code, *text) for code, text in zip(codes, texts, strict=True)]
