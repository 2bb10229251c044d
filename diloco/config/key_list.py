# SPDX-License-Identifier: Apache-2.0
"""The keys of a configuration with type, default and meaning.

A meaning is the comment of the key's field, behind it or above it, and its
rule.
"""

import dataclasses
import inspect
import re
from collections.abc import Mapping

from diloco.config import run_config, sections, simulation
from diloco.protocol import config as protocol_config
from diloco.protocol import round_policy

FIELD = re.compile(r'  (\w+): .*?(?:  # (.*))?')
ABOVE = re.compile(r'  # (.*)')


@dataclasses.dataclass(frozen=True)
class Key:
  """One key: 'outer.lr', 'float', 0.6, and its meaning."""

  name: str
  kind: str
  default: object
  meaning: str


def of_run() -> list[Key]:
  """Returns the keys of a run's configuration, in the order of its sections."""
  return _keys(run_config.SECTIONS, run_config.TOP, run_config.defaults())


def of_simulation(kind: str) -> list[Key]:
  """Returns the keys of a simulation.

  Args:
    kind: of the study, a key of `simulation.STUDIES`.
  """
  parts = {**simulation.SECTIONS, 'study': simulation.STUDIES[kind]}
  return _keys(parts, simulation.TOP, simulation.defaults(kind))


def _keys(
  parts: Mapping[str, type], top: Mapping[str, type], defaults: Mapping
) -> list[Key]:
  types = sections.key_types(parts, top)
  meanings = _meanings(run_config.RunConfig)
  for section, cls in parts.items():
    meanings |= {f'{section}.{n}': m for n, m in _meanings(cls).items()}
  return [
    Key(name, sections.type_name(types[name]), default, meanings[name])
    for name, default in sections.flatten(defaults).items()
  ]


def _meanings(cls: type) -> dict[str, str]:
  """The meanings of a dataclass's fields, those of its bases included."""
  found = {}
  for base in reversed(cls.__mro__[:-1]):
    if dataclasses.is_dataclass(base):
      found |= _comments(inspect.getsource(base))
  for name, rule in sections.rules(cls).items():
    if rule not in sections.FINITE.values():  # Of every number.
      found[name] = f'{found[name]} {rule.text.capitalize()}.'.strip()
  return found


def _comments(text: str) -> dict[str, str]:
  """The comments of fields in a class's text."""
  found, above = {}, []
  for line in text.splitlines():
    if comment := ABOVE.fullmatch(line):
      above.append(comment[1])
      continue
    if field := FIELD.fullmatch(line):
      meaning = ' '.join(filter(None, [*above, field[2]]))
      found[field[1]] = re.sub(r'(?i)a key of (\w+)', _choices, meaning)
    above = []
  return found


def _choices(found: re.Match) -> str:
  """What the protocol's comments call 'a key of NAME'."""
  for module in (protocol_config, round_policy):
    if hasattr(module, found[1]):
      return f'one of {", ".join(getattr(module, found[1]))}'
  return found[0]
