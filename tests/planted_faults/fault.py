# SPDX-License-Identifier: Apache-2.0
"""A planted fault: text that undoes one fix, and the test that must then fail.

Faults are applied to a copy of the working tree, never to the tree itself.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
TIMEOUT_S = 900.0
FAILED = 1  # The exit code of pytest where tests ran and some failed.


@dataclasses.dataclass(frozen=True)
class Edit:
  """A replacement in one file; `text` occurs there exactly once.

  It is of code, not of comments: those are worded anew more often.
  """

  path: str
  text: str
  by: str


@dataclasses.dataclass(frozen=True)
class Fault:
  """Undoes one fix.

  Attributes:
    name: of the defect that comes back; unique.
    edits: what brings it back.
    test: the node id that must fail.
    says: a regular expression that occurs in the report of the failure, so
      that the test fails for this reason and not for another.
  """

  name: str
  edits: tuple[Edit, ...]
  test: str
  says: str


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The verdict of the test on a fault.

  Attributes:
    found: whether it failed for the reason that the table gives.
    took_s: seconds of wall time.
    output: of pytest.
  """

  found: bool
  took_s: float
  output: str

  @property
  def line(self) -> str:
    """The line of pytest's report that says how the test failed."""
    found = re.findall(r'^E   +(.*)$', self.output, re.MULTILINE)
    return found[0] if found else self.output.strip().splitlines()[-1]


def fault(
  name: str, path: str, text: str, by: str, test: str, says: str
) -> Fault:
  """A fault of one edit."""
  return Fault(name, (Edit(path, text, by),), test, says)


def problems(planted: Fault, root: pathlib.Path = ROOT) -> list[str]:
  """Says why a fault can't be planted in this tree; empty: it can."""
  found = []
  for edit in planted.edits:
    path = root / edit.path
    times = path.read_text().count(edit.text) if path.exists() else 0
    if times != 1:
      found.append(f'{edit.path}: the text occurs {times} times, not once')
    if edit.text == edit.by:
      found.append(f'{edit.path}: the edit changes nothing')
  file, _, function = planted.test.partition('::')
  function = function.partition('[')[0]
  path = root / file
  if not path.exists() or f'def {function}(' not in path.read_text():
    found.append(f'there is no test {planted.test}')
  return found


@contextlib.contextmanager
def copy_of_the_tree(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """A copy of all files that git tracks or would track, removed at the end."""
  listed = subprocess.run(
    ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'],
    cwd=ROOT,
    capture_output=True,
    check=True,
  )
  for name in filter(None, listed.stdout.decode().split('\0')):
    source, target = ROOT / name, folder / name
    if source.is_file():
      target.parent.mkdir(parents=True, exist_ok=True)
      shutil.copy2(source, target)
  # Some tests ask git which files there are.
  subprocess.run(['git', 'init', '-q'], cwd=folder, check=True)
  try:
    yield folder
  finally:
    shutil.rmtree(folder, ignore_errors=True)


def run(planted: Fault, tree: pathlib.Path) -> Outcome:
  """Plants a fault in a copy of the tree, runs its test, and takes it back."""
  originals = {e.path: (tree / e.path).read_text() for e in planted.edits}
  try:
    for edit in planted.edits:
      text = (tree / edit.path).read_text()
      _write(tree / edit.path, text.replace(edit.text, edit.by))
    return _run_test(planted, tree)
  finally:
    for name, text in originals.items():
      _write(tree / name, text)


def _run_test(planted: Fault, tree: pathlib.Path) -> Outcome:
  began_s = time.monotonic()
  # `-m ''` also takes tests marked `soak`.
  options = ['-q', '-x', '-m', '', '-p', 'no:cacheprovider', '--tb=short']
  try:
    done = subprocess.run(
      [sys.executable, '-m', 'pytest', *options, planted.test],
      cwd=tree,
      env=os.environ | {'PYTHONPATH': str(tree)},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      timeout=TIMEOUT_S,
      check=False,
    )
    code, output = done.returncode, done.stdout
  except subprocess.TimeoutExpired as error:
    code, output = None, f'{error}'
  found = code == FAILED and bool(re.search(planted.says, output))
  return Outcome(found, time.monotonic() - began_s, output)


def _write(path: pathlib.Path, text: str):
  path.write_text(text)
  # A compiled file is known by time and size; both may be the same.
  for compiled in path.parent.glob(f'__pycache__/{path.stem}.*.pyc'):
    compiled.unlink()
