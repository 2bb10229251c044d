# SPDX-License-Identifier: Apache-2.0
"""Reads a nested mapping into frozen sections; lists all that is wrong.

What keys there are, and of which type, is told by the dataclasses of the
sections. Imports no jax: launchers read configurations without devices.
"""

import dataclasses
import difflib
import re
import typing
from collections.abc import Collection, Mapping

from diloco.config.sections import ConfigError

TUPLES = {
  tuple[str, ...]: (str, 'a tuple of str'),
  tuple[int, ...]: (int, 'a tuple of int'),
  tuple[float, ...]: (float, 'a tuple of float'),
}


def split_fields(
  config: type, but: Collection[str] = ()
) -> tuple[dict[str, type], dict[str, type]]:
  """Returns the types of a configuration's sections, and of its other keys."""
  types = typing.get_type_hints(config)
  types = {name: types[name] for name in types if name not in but}
  parts = {n: t for n, t in types.items() if dataclasses.is_dataclass(t)}
  return parts, {n: t for n, t in types.items() if n not in parts}


def key_types(
  sections: Mapping[str, type], top: Mapping[str, type]
) -> dict[str, type]:
  """Every valid key, such as 'outer.lr', with the type of its value.

  Args:
    sections: the dataclass of each section, by name.
    top: types of the keys outside of any section.
  """
  types = dict(top)
  for section, cls in sections.items():
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
      types[f'{section}.{field.name}'] = hints[field.name]
  return types


def typed_values(
  config: Mapping, expected: Mapping[str, type]
) -> tuple[dict[str, object], list[str]]:
  """Values by flat key, as far as they are valid, and what is wrong.

  Unknown keys are named with the nearest valid one.
  """
  given = flatten(config)
  problems = [
    f'{key}: unknown key{nearest(key, expected)}'
    for key in sorted(given.keys() - expected.keys())
  ]
  problems += [
    f'{key}: missing, expected {type_name(expected[key])}'
    for key in sorted(expected.keys() - given.keys())
  ]
  typed = {}
  for key in sorted(given.keys() & expected.keys()):
    try:
      typed[key] = _as_type(given[key], expected[key])
    except TypeError:
      problems.append(
        f'{key}={given[key]!r}: expected {type_name(expected[key])}, got '
        f'{type(given[key]).__name__}'
      )
  return typed, problems


def make_sections(
  typed: Mapping[str, object], sections: Mapping[str, type]
) -> tuple[dict[str, object], list[str]]:
  """The sections of which all values are there, and the rules they break."""
  parts, problems = {}, []
  for section, cls in sections.items():
    names = [field.name for field in dataclasses.fields(cls)]
    if not all(f'{section}.{name}' in typed for name in names):
      continue  # Already reported as missing or of the wrong type.
    try:
      parts[section] = cls(**{n: typed[f'{section}.{n}'] for n in names})
    except ConfigError as error:
      problems += error.problems
    except ValueError as error:  # ProtocolConfig's own rules.
      rules = re.split(r'; (?=\w+=)', str(error).removeprefix(f'{section}: '))
      problems += [f'{section}.{rule}' for rule in rules]
  return parts, problems


def nearest(key: str, valid) -> str:
  """Returns ', did you mean …?' with the valid key most like `key`, or ''."""
  section, _, name = key.rpartition('.')
  initials = ''.join(word[:1] for word in name.split('_'))
  short = f'{section}.{initials}'
  if '_' in name and short in valid:  # learning_rate is called lr.
    return f', did you mean {short}?'
  near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
  if not near:  # The section may be wrong, or left out.
    last = key.rpartition('.')[2]
    near = [k for k in sorted(valid) if k.rpartition('.')[2] == last]
  return f', did you mean {near[0]}?' if near else ''


def flatten(config: Mapping, prefix: str = '') -> dict[str, object]:
  """Flattens a nested mapping: {'outer': {'lr': 1.0}} to {'outer.lr': 1.0}."""
  flat = {}
  for key in config:
    value = config[key]
    if hasattr(value, 'keys'):  # Mapping or ConfigDict.
      flat |= flatten(value, f'{prefix}{key}.')
    else:
      flat[f'{prefix}{key}'] = value
  return flat


def _as_type(value, kind):
  """Converts `value` to `kind`; an int may be a float, a bool is never an
  int.
  """
  if kind in TUPLES:
    if not isinstance(value, list | tuple):
      raise TypeError
    return tuple(_as_type(item, TUPLES[kind][0]) for item in value)
  if kind is float and type(value) is int:
    value = float(value)
  if type(value) is not kind:
    raise TypeError
  return value


def type_name(kind) -> str:
  """Returns what a message calls the type of a key."""
  return TUPLES[kind][1] if kind in TUPLES else kind.__name__
