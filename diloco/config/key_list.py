# SPDX-License-Identifier: Apache-2.0
"""The keys of a configuration with type, default and meaning.

A meaning is the comment of the key's field, behind it or above it.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping

from diloco.config import lab_section, parsing, run_config, simulation
from diloco.fleets import failures, systems
from diloco.models import kinds
from diloco.numerics import fragments, optimizers, schedule
from diloco.protocol import config as protocol_config
from diloco.protocol import weights

# What comments call 'a key of NAME'.
CHOICES = {
  'ADMISSIONS': protocol_config.ADMISSIONS,
  'BLENDS': protocol_config.BLENDS,
  'EMBEDDINGS': fragments.EMBEDDINGS,
  'INNER': optimizers.INNER,
  'KINDS': kinds.KINDS,
  'OUTER': optimizers.OUTER,
  'QUORUM_RULES': protocol_config.QUORUM_RULES,
  'RECOVERIES': systems.RECOVERIES,
  'REPAIRS': failures.REPAIRS,
  'SCHEDULES': schedule.SCHEDULES,
  'SCHEMES': fragments.SCHEMES,
  'SYSTEMS': lab_section.SYSTEMS,
  'WEIGHTS': weights.WEIGHTS,
}
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
  meanings = _top(run_config.RunConfig) | _of_sections(run_config.SECTIONS)
  return list(_keys(run_config.key_types(), run_config.defaults(), meanings))


def of_simulation(kind: str) -> list[Key]:
  """Returns the keys of a simulation.

  Args:
    kind: of the study, a key of `simulation.STUDIES`.
  """
  parts = {**simulation.SECTIONS, 'study': simulation.STUDIES[kind]}
  meanings = _top(run_config.RunConfig) | _of_sections(parts)
  meanings['study.kind'] = 'Of the study.'
  types = parsing.key_types(parts, simulation.TOP)
  return list(_keys(types, simulation.defaults(kind), meanings))


def _keys(
  types: Mapping, defaults: Mapping, meanings: Mapping
) -> Iterator[Key]:
  for name, default in parsing.flatten(defaults).items():
    kind = parsing.type_name(types[name]) if name in types else 'str'
    meaning = re.sub(
      r'a key of (\w+)', _choices, meanings.get(name, ''), flags=re.I
    )
    yield Key(name, kind, default, meaning)


def _choices(found: re.Match) -> str:
  return f'one of {", ".join(CHOICES[found[1]])}'


def _of_sections(parts: Mapping[str, type]) -> dict[str, str]:
  return {
    f'{section}.{name}': meaning
    for section, cls in parts.items()
    for name, meaning in _top(cls).items()
  }


def _top(cls: type) -> dict[str, str]:
  """The meanings of a dataclass's fields, those of its bases included."""
  found = {}
  for base in reversed(cls.__mro__[:-1]):
    if dataclasses.is_dataclass(base):
      found |= _comments(inspect.getsource(base))
  return found


def _comments(text: str) -> dict[str, str]:
  """The comments of fields in a class's text."""
  found, above = {}, []
  for line in text.splitlines():
    if comment := ABOVE.fullmatch(line):
      above.append(comment[1])
      continue
    if field := FIELD.fullmatch(line):
      found[field[1]] = ' '.join(filter(None, [*above, field[2]]))
    above = []
  return found
