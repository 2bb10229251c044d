# SPDX-License-Identifier: Apache-2.0
"""An event of the syncer is followed down through few files.

To learn what an event does, one begins with the machine's dispatch and reads
each function where it is first called. The test reads the same way: calls in
their order, through all branches, but of the dispatch only the case of the
event; each function once. It counts how often that leads back to a file that
was left before.
"""

import ast
import collections
import pathlib
import typing

import pytest

from diloco.protocol import messages
from diloco.protocol.syncer import events as syncer_events

PACKAGE = 'diloco.protocol.syncer'
FOLDER = pathlib.Path(__file__).parents[2] / PACKAGE.replace('.', '/')
RETURNS_MAX = 30
START = 'machine', 'Syncer.handle'
# Methods of these are read as those of the built-in type.
BUILT_IN = {name for kind in (dict, set, list, str) for name in dir(kind)}
EVENTS = [
  *((event.__name__, None) for event in typing.get_args(syncer_events.Event)),
  *(('Heard', message.__name__) for message in messages.FROM_LEARNER),
]
EVENTS.remove(('Heard', None))


class _Reader:
  """Reads what one event does.

  Attributes:
    stays: modules in the order in which they are entered.
  """

  def __init__(self, sources: dict[str, str], event: str, message: str | None):
    self.stays: list[str] = []
    self._names = {event, message}
    self._functions: dict[tuple[str, str], ast.FunctionDef] = {}
    self._methods = collections.defaultdict(list)
    self._imported: dict[str, dict[str, tuple[str, str | None] | None]] = {}
    self._read: set[tuple[str, str]] = set()
    for module, text in sources.items():
      self._index(module, ast.parse(text))
    self._visit(START)

  @property
  def returns(self) -> int:
    return len(self.stays) - len(set(self.stays))

  def _index(self, module: str, tree: ast.Module):
    for node in tree.body:
      if isinstance(node, ast.FunctionDef):
        self._functions[module, node.name] = node
      for each in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(each, ast.FunctionDef):
          key = module, f'{node.name}.{each.name}'
          self._functions[key] = each
          self._methods[each.name].append(key)
    names = self._imported[module] = {}
    for node in tree.body:
      if isinstance(node, ast.Import | ast.ImportFrom):
        origin = getattr(node, 'module', '')
        for each in node.names:
          name = each.asname or each.name
          if origin == PACKAGE:
            names[name] = each.name, None
          elif origin.startswith(f'{PACKAGE}.'):
            names[name] = origin.rpartition('.')[2], each.name
          else:
            names[name] = None  # Of another package.

  def _visit(self, key: tuple[str, str]):
    if key not in self._functions or key in self._read:
      return
    self._read.add(key)
    if self.stays[-1:] != [key[0]]:
      self.stays.append(key[0])
    for node in self._functions[key].body:
      self._follow(key[0], node)

  def _follow(self, module: str, node: ast.AST):
    if isinstance(node, ast.Match):
      cases = (x for x in node.cases if self._is_of_event(x.pattern))
      for each in next(cases).body:
        self._follow(module, each)
      return
    for each in ast.iter_child_nodes(node):
      self._follow(module, each)
    if isinstance(node, ast.Call):
      self._visit(self._called(module, node.func))

  def _is_of_event(self, pattern: ast.pattern) -> bool:
    return (
      isinstance(pattern, ast.MatchClass)
      and ast.unparse(pattern.cls).rpartition('.')[2] in self._names
      and all(map(self._is_of_event, pattern.kwd_patterns))
    )

  def _called(self, module: str, func: ast.expr) -> tuple[str, str | None]:
    """Returns module and name of a function that is called."""
    names = self._imported[module]
    if isinstance(func, ast.Name):
      return names.get(func.id) or (module, func.id)
    if not isinstance(func, ast.Attribute):
      return module, None
    if isinstance(func.value, ast.Name) and func.value.id in names:
      origin = names[func.value.id]
      return (origin[0], func.attr) if origin else (module, None)
    methods = self._methods[func.attr]
    if func.attr in BUILT_IN or not methods:
      return module, None
    return next((key for key in methods if key[0] == module), methods[0])


def _sources() -> dict[str, str]:
  files = FOLDER.glob('*.py')
  return {f.stem: f.read_text() for f in files if f.stem != '__init__'}


@pytest.mark.parametrize(('event', 'message'), EVENTS)
def test_an_event_is_followed_through_few_files(event, message):
  reader = _Reader(_sources(), event, message)
  assert len(set(reader.stays)) > 5, reader.stays  # It did follow the calls.
  assert reader.returns <= RETURNS_MAX, reader.stays


def test_a_detour_is_found():
  """A step of `closing` asks the state twice, with a helper between."""
  sources = _sources()
  before = _Reader(sources, 'Merged', None).returns
  step = '  for learner in state.members:\n    offers.discard_void('
  assert step in sources['closing']
  sources['closing'] = sources['closing'].replace(
    step, f'  state.look()\n  _look(state)\n{step}'
  )
  sources['closing'] += '\n\ndef _look(state):\n  state.look_again()\n'
  sources['state'] += (
    '\n  def look(self):\n    pass\n\n  def look_again(self):\n    pass\n'
  )
  reader = _Reader(sources, 'Merged', None)
  assert reader.returns == before + 3, reader.stays
