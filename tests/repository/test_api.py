# SPDX-License-Identifier: Apache-2.0
"""The names of `import diloco`: said once, loaded late, and documented."""

import ast
import inspect
import re
import types

import pytest

import diloco
from tests.commands import output
from tests.repository import tree

PAGE = 'docs/api.md'
# `### name(arguments)`, and what stands below it.
SECTION = re.compile(
  r'^### `(\w+)\(([^\n]*)\)`\n(.*?)(?=^##|\Z)', re.MULTILINE | re.DOTALL
)
# `* [section](#…): names`, of the list at the beginning.
LISTED = re.compile(r'^\* \[[\w ]+\]\(#[\w-]+\): ((?:.+\n)(?:  .+\n)*)', re.M)
EXAMPLE = re.compile(r'^```(?:python|text)\n(.*?)^```$', re.M | re.DOTALL)
LINES_MAX = 6  # Of an example: `import diloco`, and five more.
FRESH = """
import sys
import diloco
print(*dir(diloco))
print(sorted({'jax', 'numpy', 'absl'} & sys.modules.keys()))
diloco.ByHand(diloco.ProtocolConfig()), diloco.Cluster, diloco.plan
print('jax' in sys.modules)
"""


def _sections() -> dict[str, tuple[str, str]]:
  """Returns the arguments and the text of each name of the page."""
  found = SECTION.findall((tree.ROOT / PAGE).read_text())
  return {name: (arguments, text) for name, arguments, text in found}


def test_names_are_those_of_the_page_and_of_a_fresh_process():
  listed, loaded, has_jax = output('-c', FRESH).splitlines()
  assert listed.split() == sorted(diloco.__all__) == sorted(diloco.PLACES)
  assert (loaded, has_jax) == ('[]', 'False')
  assert sorted(_sections()) == sorted(diloco.__all__)
  lists = LISTED.findall((tree.ROOT / PAGE).read_text())
  named = [name for each in lists for name in re.findall(r'`(\w+)`', each)]
  assert sorted(named) == sorted(diloco.__all__)


@pytest.mark.parametrize('name', diloco.__all__)
def test_a_name_is_documented(name):
  """With its arguments, in order, a paragraph and a short example."""
  arguments, text = _sections()[name]
  value = getattr(diloco, name)
  wanted = [
    ('**' if each.kind is each.VAR_KEYWORD else '') + each.name
    for each in inspect.signature(value).parameters.values()
  ]
  given = [
    re.match(r'[*\w]+', x.strip())[0]
    for x in _split(arguments)
    if x.strip() != '*'
  ]
  assert given == wanted
  assert (inspect.getdoc(value) or '').strip()
  (example,) = EXAMPLE.findall(text)
  assert f'diloco.{name}' in example or name == 'Run'
  assert len(example.splitlines()) <= LINES_MAX
  assert len(text.split('\n\n')[1]) > 60


def _split(arguments: str) -> list[str]:
  """Splits at commas, but for those inside of brackets."""
  return re.split(r',\s*(?![^({]*[)}])', arguments)


def test_type_checkers_see_the_same_names():
  tree_ = ast.parse((tree.ROOT / 'diloco' / '__init__.py').read_text())
  (guarded,) = (node for node in tree_.body if isinstance(node, ast.If))
  imported = {
    alias.asname or alias.name: f'{node.module}:{alias.name}'
    for node in guarded.body
    for alias in node.names
  }
  assert imported == diloco.PLACES


def test_a_module_of_that_name_is_called_as_the_function():
  """Once a part of it is imported, `diloco.lab` is the package."""
  code = (
    'import inspect\nimport diloco\nfunction = diloco.plan\n'
    'import diloco.plan, diloco.lab, diloco.simulate\n'
    'print(diloco.plan is not function)\n'
    'print(inspect.signature(diloco.plan) == inspect.signature(function))\n'
    "print(diloco.plan('5B', on='4xv5e-256', bandwidth_gbps=2))"
  )
  is_module, is_same, first, *_ = output('-c', code).splitlines()
  assert (is_module, is_same) == ('True', 'True')
  assert first.startswith('5 B parameters')


def test_an_unknown_name_is_refused():
  with pytest.raises(AttributeError, match="no attribute 'trian'"):
    diloco.trian  # noqa: B018
  assert not isinstance(diloco.merge, types.ModuleType)
