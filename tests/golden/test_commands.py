# SPDX-License-Identifier: Apache-2.0
"""Each command line of 0.1.0's pages still starts, or CHANGELOG says instead.

`commands.txt` has them as they stood there: the page, a tab, the line. What is
looked at is what a line starts, and the flags that it gives to it.
"""

import importlib.util
import pathlib
import re

import pytest

from diloco.__main__ import COMMANDS
from tests.launch.forked import run_all
from tests.repository import tree

HERE = pathlib.Path(__file__).parent
LINES = sorted(
  {
    line.partition('\t')[2]
    for line in (HERE / 'commands.txt').read_text().splitlines()
  }
)
MODULE = re.compile(r'python3? -m ((?:diloco|launch|tests)\.[\w.]*\w)')
COMMAND = re.compile(r'(?:python3? -m )?diloco ([a-z-]+)')
SCRIPT = re.compile(r'bash (\S+\.sh)')
FLAG = re.compile(r'(?<!\S)\[?--(\w+)')
SHOWN = re.compile(r'^  --(?:\[no\])?(\w+)', re.MULTILINE)
# What commands import, once for all of them.
HEAVY = ('launch.local', 'diloco.run.spec', 'jax', 'optax')


def _unreleased() -> str:
  return (tree.ROOT / 'CHANGELOG.md').read_text().split('## 0.1.0')[0]


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


@pytest.mark.parametrize('line', LINES)
def test_a_command_is_there_or_its_successor_is_named(line):
  if line == 'python -m diloco COMMAND' or _is_there(line):
    return
  name = (MODULE.match(line) or COMMAND.match(line))[1]
  assert name in _unreleased(), name


@pytest.mark.parametrize(
  'line', ['diloco gone', 'python -m diloco.gone --x', 'bash gone.sh']
)
def test_one_that_is_gone_would_be_found(line):
  assert not _is_there(line)


def _module(line: str) -> str | None:
  """Returns the module that a line starts; None: it starts a script, or none
  that is there.
  """
  if SCRIPT.match(line) or not _is_there(line):
    return None
  if found := MODULE.match(line):
    return found[1]
  return COMMANDS[COMMAND.match(line)[1]][0]


def _flags(line: str) -> set[str]:
  return {*FLAG.findall(line.partition(' # ')[0])}


def test_flags_of_a_line():
  line = 'diloco x --config.a.b=1 --to=gke … [--port=80] --cpu_devices # --no'
  assert _flags(line) == {'config', 'to', 'port', 'cpu_devices'}
  assert _module('python -m diloco.watch RUN') == 'diloco.watch'
  assert _module('diloco train --page') == 'launch.train'
  assert _module('bash tests/run.sh tests/protocol --rewrite') is None


def test_flags_are_listed_by_help_or_named_in_the_changelog():
  given = {line: _module(line) for line in LINES}
  modules = sorted({module for module in given.values() if module})
  helps = run_all(
    [[module, '--help'] for module in modules], HEAVY, JAX_PLATFORMS='cpu'
  )
  shown = {m: {*SHOWN.findall(h.out)} for m, h in zip(modules, helps)}
  named = {*re.findall(r'--(\w+)', _unreleased())}
  assert [m for m, flags in shown.items() if not flags] == []
  assert [
    (line, gone)
    for line, module in given.items()
    if module and (gone := _flags(line) - shown[module] - named)
  ] == []
