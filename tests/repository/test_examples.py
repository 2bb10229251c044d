# SPDX-License-Identifier: Apache-2.0
"""Python in README and docs runs: every block between ```python and ```.

Each block has a namespace of its own; those of a page run in order in one
folder, so that a run that one of them makes can be opened by the next. What
needs a TPU, a cluster or a minute is marked as text. `test_installed_pages`
runs them as a reader of the wheel, with the commands between ```sh and ```.
"""

import json
import pathlib
import re
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence

from tests.commands import output
from tests.repository import tree

PAGES = ('README.md', 'docs/*.md')
BLOCK = re.compile(r'^```(\w+)\n(.*?)^```$', re.MULTILINE | re.DOTALL)
# Code that is indented instead, and so not run: an import, or a definition.
UNMARKED = re.compile(
  r'^    (?:import \w+$|import \w+, |from [\w.]+ import |def \w+\()',
  re.MULTILINE,
)


def all_blocks(text: str) -> list[tuple[int, str, str]]:
  """Returns number of the first line, language and text of a page's blocks."""
  return [
    (text.count('\n', 0, found.start(2)) + 1, found[1], found[2])
    for found in BLOCK.finditer(text)
  ]


def blocks(text: str) -> list[tuple[int, str]]:
  """Returns the blocks of Python, each with the number of its first line."""
  return [
    (line, block)
    for line, language, block in all_blocks(text)
    if language == 'python'
  ]


def failures(
  pages: Mapping[str, Sequence[tuple[int, str]]], folder: pathlib.Path
) -> list[str]:
  """Runs the blocks of pages; returns what went wrong, and where.

  Args:
    folder: of the files that the blocks are written to, at their lines.
  """
  wrong = []
  for page, of_page in pages.items():
    for line, block in of_page:
      path = folder / f'{page.replace("/", "-")}.py'
      path.write_text('\n' * (line - 1) + block)
      try:
        runpy.run_path(str(path), run_name='example')
      except Exception:  # noqa: BLE001 - it is what the test is about.
        last = traceback.format_exc().splitlines()
        at = [x.strip() for x in last if path.name in x][-1:]
        wrong.append(f'{page}:{line}: {last[-1]} ({" ".join(at)})')
  return wrong


def test_python_blocks_run(tmp_path):
  """In one process that is not this one, which has imported much already."""
  pages = {
    name: blocks((tree.ROOT / name).read_text())
    for name in tree.tracked(*PAGES)
  }
  assert sum(map(len, pages.values())) > 10
  (tmp_path / 'pages.json').write_text(json.dumps(pages))
  out = output(
    *('-m', 'tests.repository.test_examples', tmp_path / 'pages.json'),
    cwd=tmp_path,
    PYTHONPATH=str(tree.ROOT),
    JAX_PLATFORMS='cpu',
  )
  assert json.loads(out.splitlines()[-1]) == []


def test_a_broken_block_is_found(tmp_path):
  text = (
    'Words.\n\n```python\nx = 1\nprint(x / 0)\n```\n\n```text\n1 / 0\n```\n'
  )
  (wrong,) = failures({'page.md': blocks(text)}, tmp_path)
  assert wrong.startswith('page.md:4: ZeroDivisionError')
  assert 'line 5' in wrong
  apart = '```python\nx = 1\n```\n```python\nx\n```\n'
  (wrong,) = failures({'page.md': blocks(apart)}, tmp_path)
  assert 'NameError' in wrong


def test_python_is_marked():
  for name in tree.tracked(*PAGES):
    assert not UNMARKED.findall((tree.ROOT / name).read_text()), name
  assert UNMARKED.findall('As follows:\n\n    from x import y\n')


if __name__ == '__main__':
  read = json.loads(pathlib.Path(sys.argv[1]).read_text())
  print('\n' + json.dumps(failures(read, pathlib.Path.cwd())))
