# SPDX-License-Identifier: Apache-2.0
"""Lists the keys of a configuration: python -m diloco.config [SECTION …]

  python -m diloco.config                     all keys of a run
  python -m diloco.config protocol outer.lr   of sections, or single keys
  python -m diloco.config --study=goodput     of a simulation
  python -m diloco.config --from=hf:DIR       those by which a run starts from
                                              weights, as a file of --config

A line has a key, its type, its default and its meaning: the comment of the
key's field, behind it or above it, and its rule. What a command's own
configuration comes to, COMMAND --config=… --print_config writes.
"""

import dataclasses
import inspect
import re
from collections.abc import Mapping

from absl import flags as absl_flags

from diloco.config import (
  config_files,
  flags,
  pretrained,
  run_config,
  sections,
  simulation,
)
from diloco.config.sections import ConfigError

FIELD = re.compile(r'  (\w+): .*?(?:  # (.*))?')
ABOVE = re.compile(r'  # (.*)')

_STUDY = absl_flags.DEFINE_enum(
  'study', None, list(simulation.STUDIES), 'Lists the keys of a simulation.'
)

_FROM = absl_flags.DEFINE_string(
  'from', None, 'Weights to start from: hf:FOLDER of Hugging Face, or a run.'
)


def main(argv) -> int:
  """Prints the keys that are asked for.

  Raises:
    ConfigError: there is no such section or key, or no such weights.
  """
  if _FROM.value is not None:
    print(from_weights(_FROM.value), end='')
    return 0
  study = _STUDY.value
  keys = of_simulation(study) if study else of_run()
  asked = argv[1:]
  names = {key.name for key in keys}
  names |= {key.name.partition('.')[0] for key in keys}
  if unknown := [word for word in asked if word not in names]:
    raise ConfigError(
      [f'{w}: no section or key{sections.nearest(w, names)}' for w in unknown]
    )
  rows = [
    (key.name, key.kind, repr(key.default), key.meaning)
    for key in keys
    if not asked or {key.name, key.name.partition('.')[0]} & {*asked}
  ]
  widths = [max(len(row[i]) for row in rows) for i in range(2)]
  for name, kind, default, meaning in rows:
    print(f'{name:{widths[0]}}  {kind:{widths[1]}}  {default:14}  {meaning}')
  return 0


def from_weights(init_from: str) -> str:
  """Returns a file of --config for a run that starts from weights.

  Raises:
    ConfigError: they can't be used.
  """
  config: dict[str, dict] = {}
  with flags.refusing():
    for key, value in pretrained.keys_of(init_from).items():
      section, _, name = key.partition('.')
      config.setdefault(section, {})[name] = value
  return config_files.source(config, f'Starts from {init_from}.')


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
  meanings = {}
  for base in reversed(cls.__mro__[:-1]):
    if dataclasses.is_dataclass(base):
      meanings |= _comments(base)
  for name, rule in sections.rules(cls).items():
    if rule not in sections.FINITE.values():  # Of every number.
      meanings[name] = f'{meanings[name]} {rule.text.capitalize()}.'.strip()
  return meanings


def _comments(cls: type) -> dict[str, str]:
  """The comments of a class's fields; 'a key of NAME' becomes the choices."""
  comments, above, module = {}, [], inspect.getmodule(cls)

  def choices(named: re.Match) -> str:
    keys = getattr(module, named[1], None)
    return f'one of {", ".join(keys)}' if keys else named[0]

  for line in inspect.getsource(cls).splitlines():
    if comment := ABOVE.fullmatch(line):
      above.append(comment[1])
      continue
    if field := FIELD.fullmatch(line):
      meaning = ' '.join(filter(None, [*above, field[2]]))
      comments[field[1]] = re.sub(r'\ba key of (\w+)', choices, meaning)
    above = []
  return comments


if __name__ == '__main__':
  flags.run_without_config(main)
