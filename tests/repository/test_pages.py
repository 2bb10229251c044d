# SPDX-License-Identifier: Apache-2.0
"""README and docs: what they link to, name and tell to run is there."""

import ast
import importlib.util
import pathlib
import re

import pytest

from diloco import __main__ as diloco_main
from tests.repository import tree

README = 'README.md'
COMMANDS = ('bash launch/quickstart.sh', 'bash tests/run.sh')
# What a reader follows. The CHANGELOG tells of what there was, too.
PAGES = [name for name in tree.tracked('*.md') if name != 'CHANGELOG.md']
LINK = re.compile(r'\]\(([^)\s]+)\)')
MODULE = re.compile(r'python\S* -m ([a-z_][\w.]*\w)')
# In backquotes, from the root; a pattern such as tests/*/test_*.py may be one.
PATH = re.compile(
  r'`((?:colab|diloco|docs|experiments|launch|tests)/[^`\s:]*)[`:]'
)


def _text(name: str) -> str:
  return (tree.ROOT / name).read_text()


def _anchors(path: pathlib.Path) -> set[str]:
  """Returns the anchors that a page's headings have on GitHub."""
  headings = re.findall(r'^#+ (.*)$', path.read_text(), re.MULTILINE)
  kept = (re.sub(r'[^\w\- ]', '', heading.lower()) for heading in headings)
  return {heading.replace(' ', '-') for heading in kept}


def _broken(name: str, text: str) -> list[str]:
  """Relative links of a page that leader nowhere."""
  broken = []
  for link in LINK.findall(text):
    if re.match(r'\w+:', link):
      continue
    relative, _, anchor = link.partition('#')
    path = (
      (tree.ROOT / name).parent / relative if relative else tree.ROOT / name
    )
    if not path.exists() or (anchor and anchor not in _anchors(path)):
      broken.append(link)
  return broken


def _absent(text: str) -> list[str]:
  """Modules that a page runs by `python -m`, and that can't be found."""
  return [m for m in MODULE.findall(text) if not _is_module(m)]


def _is_module(name: str) -> bool:
  try:
    return importlib.util.find_spec(name) is not None
  except ModuleNotFoundError:
    return False


def test_readme_commands_are_those_of_an_installation_too():
  """`python -m launch…` needs the checkout, which a wheel has not."""
  text = _text(README)
  assert not re.findall(r'python -m \S+', text)
  found = re.findall(r'(?:^    |`)diloco ([a-z-]+) ', text, re.MULTILINE)
  assert {'train', 'plan', 'launch', 'watch'} <= set(found)
  assert set(found) <= set(diloco_main.COMMANDS)


@pytest.mark.parametrize('name', PAGES)
def test_links_resolve(name):
  assert not _broken(name, _text(name))


@pytest.mark.parametrize('name', PAGES)
def test_modules_that_are_run_can_be_found(name):
  assert not _absent(_text(name))


@pytest.mark.parametrize('name', PAGES)
def test_paths_that_are_named_exist(name):
  absent = [p for p in PATH.findall(_text(name)) if not _exists(p)]
  assert not absent


def _exists(path: str) -> bool:
  return any(tree.ROOT.glob(path.rstrip('/')))


def test_what_leads_nowhere_would_be_found():
  assert _broken('docs/data.md', '[a](absent.md) [b](data.md#absent)') == [
    'absent.md',
    'data.md#absent',
  ]
  assert not _broken('docs/data.md', '[a](../README.md#a-result) [b](#limits)')
  assert _absent('python -m diloco.absent; python -m absent.at.all')
  assert not _absent('.venv/bin/python -m launch.local')


def test_every_package_has_a_row_in_the_table_of_imports():
  text = _text('docs/design.md')
  for path in (tree.ROOT / 'diloco').glob('*/__init__.py'):
    assert f'| `diloco/{path.parent.name}` |' in text


def _literals() -> list[str]:
  """All strings of the program; … stands for what is filled in."""
  found = []
  for name in tree.tracked('diloco/*.py', 'launch/*.py'):
    for node in ast.walk(ast.parse((tree.ROOT / name).read_text())):
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        found.append(re.sub(r'%[.\d]*[sdrf]', '…', node.value))
      elif isinstance(node, ast.JoinedStr):
        parts = (getattr(part, 'value', '…') for part in node.values)
        found.append(
          ''.join(part if isinstance(part, str) else '…' for part in parts)
        )
  return found


def test_messages_that_are_explained_are_those_of_the_program():
  page = _text('docs/troubleshooting.md')
  messages = re.findall(r'^\| `([^`]+)` \|', page, re.MULTILINE)
  literals = _literals()
  unknown = [m for m in messages if not any(m in said for said in literals)]
  assert len(messages) > 10
  assert not unknown
