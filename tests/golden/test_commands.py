# SPDX-License-Identifier: Apache-2.0
"""Each command line of 0.1.0's pages still starts, or CHANGELOG says instead.

`commands.txt` has them as they stood there: the page, a tab, the line. Each
command's own tests follow its flags; here it is what is started.
"""

import importlib.util
import pathlib
import re

import pytest

from diloco.__main__ import COMMANDS
from tests.repository import tree

HERE = pathlib.Path(__file__).parent
LINES = (HERE / 'commands.txt').read_text().splitlines()
MODULE = re.compile(r'python3? -m ((?:diloco|launch|tests)\.[\w.]*\w)')
COMMAND = re.compile(r'(?:python3? -m )?diloco ([a-z-]+)')
SCRIPT = re.compile(r'bash (\S+\.sh)')


def _is_there(line: str) -> bool:
  if found := SCRIPT.match(line):
    return (tree.ROOT / found[1]).exists()
  if found := MODULE.match(line):
    try:
      return importlib.util.find_spec(found[1]) is not None
    except ModuleNotFoundError:
      return False
  found = COMMAND.match(line)
  return found is not None and found[1] in COMMANDS


@pytest.mark.parametrize(
  'line', sorted({line.partition('\t')[2] for line in LINES})
)
def test_a_command_is_there_or_its_successor_is_named(line):
  if line == 'python -m diloco COMMAND' or _is_there(line):
    return
  name = (MODULE.match(line) or COMMAND.match(line))[1]
  unreleased = (tree.ROOT / 'CHANGELOG.md').read_text().split('## 0.1.0')[0]
  assert name in unreleased, name


@pytest.mark.parametrize(
  'line', ['diloco gone', 'python -m diloco.gone --x', 'bash gone.sh']
)
def test_one_that_is_gone_would_be_found(line):
  assert not _is_there(line)
