# SPDX-License-Identifier: Apache-2.0
"""The files of --config: where they are found, and what they leave out.

A file has `get_config()`, which returns a `ConfigDict` or a dict of the keys
that it changes; all others have their defaults. `experiments/NAME.py` is also
found outside a checkout. A file may also be the config.json of a run, and
`DEFAULTS` stands for none.
"""

import dataclasses
import json
import os
import pathlib
import runpy
from collections.abc import Mapping

import ml_collections
from absl import flags

from diloco.config import run_config, sections, simulation
from diloco.config.own_code import EXPERIMENTS, NAME, make_importable
from diloco.config.sections import ConfigError

DEFAULTS = 'defaults'  # In place of a file.
JSON = '.json'
INFINITIES = (float('inf'), -float('inf'))


def find(path: str) -> str:
  """Returns the path of experiments/NAME that was meant, or `path` itself.

  Args:
    path: relative to the working directory, perhaps with an argument behind a
      colon.
  """
  name, colon, argument = path.partition(':')
  shipped = EXPERIMENTS.parent / name
  if (
    name.startswith(f'{NAME}/')
    and not pathlib.Path(name).exists()
    and shipped.is_file()
  ):
    return f'{shipped}{colon}{argument}'
  return path


def read(path: str):
  """Runs `get_config` of a file, and fills what it leaves out.

  Returns:
    All keys; None: the file has no get_config().

  Raises:
    SyntaxError, ImportError: the file can not be run.
    ValueError: it does not take its argument, or is no run's config.json.
  """
  name, colon, argument = path.partition(':')
  if name == DEFAULTS:
    return fill({})
  if name.endswith(JSON):
    return _recorded(pathlib.Path(name))
  make_importable(name)
  get_config = runpy.run_path(name).get('get_config')
  if get_config is None:
    return None
  return fill(get_config(argument) if colon else get_config())


def checked(
  path: str, what: str, example: str = f'{NAME}/train.py'
) -> ml_collections.ConfigDict:
  """Calls `read` on what a user has named.

  Args:
    what: the name of the value, such as '--config=mine.py'.
    example: of a file that would do.

  Raises:
    ConfigError: there is no such file, or it gives no configuration.
  """
  name = path.partition(':')[0]
  if name != DEFAULTS and not pathlib.Path(name).is_file():
    raise ConfigError(f'{what}: no such file, such as --config={example}')
  try:
    config = read(path)
  except (SyntaxError, ImportError) as error:
    raise ConfigError(f'{what}: can not be read as Python: {error}') from None
  except ValueError as error:
    raise ConfigError(f'{what}: {error}') from None
  if config is None:
    raise ConfigError(f'{what}: the file has no get_config()')
  if not hasattr(config, 'keys'):
    raise ConfigError(
      f'{what}: get_config() gave a {type(config).__name__}, must give a '
      'ConfigDict'
    )
  return config


def given(
  config: str | os.PathLike | Mapping | run_config.RunConfig,
  changes: Mapping[str, object] | None = None,
) -> ml_collections.ConfigDict:
  """Returns all keys of what a caller in Python gives as a configuration.

  Args:
    config: a file, as --config takes it; or a nested mapping of the keys that
      differ from their defaults, which is not changed; or a checked value.
    changes: values by dotted key, such as {'protocol.total_steps': 100}.

  Raises:
    ConfigError: there is no such file or key, or it is no configuration.
  """
  if isinstance(config, str | os.PathLike):
    path = find(os.fspath(config))
    keys = checked(path, f'config={path!r}')
  elif isinstance(config, run_config.RunConfig):
    keys = fill(_with_tuples(run_config.unfold(dataclasses.asdict(config))))
  elif isinstance(config, Mapping | ml_collections.ConfigDict):
    keys = fill(ml_collections.ConfigDict(_copied(config)))
  else:
    raise ConfigError(
      f'config={config!r}: must be a file such as {NAME}/train.py, or a '
      "mapping such as {'protocol': {'total_steps': 100}}"
    )
  flat = sections.flatten(keys)
  unknown = [key for key in changes or () if key not in flat]
  if unknown:
    raise ConfigError(
      [f'{k}: unknown key{sections.nearest(k, flat)}' for k in unknown]
    )
  with keys.unlocked(), keys.ignore_type():
    keys.update_from_flattened_dict(dict(changes or {}))
  return keys


def _copied(config: Mapping) -> dict:
  """Returns nested mappings as dicts of their own."""
  nested = Mapping, ml_collections.ConfigDict
  return {
    key: _copied(value) if isinstance(value, nested) else value
    for key, value in config.items()
  }


def _recorded(path: pathlib.Path) -> ml_collections.ConfigDict:
  """Reads a run's config.json; keys that are newer have their defaults."""
  try:
    fields = json.loads(path.read_text())
  except ValueError as error:
    raise ValueError(f'{path}: is no JSON ({error})') from None
  if not isinstance(fields, Mapping):
    raise ValueError(f'{path}: holds no configuration')
  return ml_collections.ConfigDict(
    _with_tuples(run_config.unfold(fields)), convert_dict=True
  )


def _with_tuples(value):
  """JSON has lists where the configuration has tuples."""
  if isinstance(value, Mapping):
    return {key: _with_tuples(each) for key, each in value.items()}
  return tuple(value) if isinstance(value, list) else value


def fill(config):
  """Gives a configuration the defaults of the keys that it does not have.

  With a section `study` it is that of a simulation. What has no valid kind, or
  is no mapping, stays as it is.
  """
  if isinstance(config, dict):
    config = ml_collections.ConfigDict(config)
  if not isinstance(config, ml_collections.ConfigDict):
    return config
  study = config.get('study')
  if study is None:
    defaults = run_config.defaults()
  elif hasattr(study, 'get') and study.get('kind') in simulation.STUDIES:
    defaults = simulation.defaults(study.kind)
  else:
    return config
  with config.unlocked(), config.ignore_type():
    _fill_section(config, defaults)
  return config


def _fill_section(config: ml_collections.ConfigDict, defaults: Mapping):
  for key, default in defaults.items():
    if key not in config:
      config[key] = (
        ml_collections.ConfigDict(default)
        if isinstance(default, Mapping)
        else default
      )
    elif isinstance(default, Mapping):
      if isinstance(config[key], ml_collections.ConfigDict):
        _fill_section(config[key], default)
    elif type(default) is float and type(config[key]) is int:
      config[key] = float(config[key])  # So that a flag may make it 0.5.


def non_default_keys(config: Mapping) -> dict[str, object]:
  """Returns the keys of a run that differ from their defaults.

  Args:
    config: all keys of the run.
  """
  changes: dict[str, object] = {}
  for key, default in run_config.defaults().items():
    value = config[key]
    if isinstance(default, Mapping):
      value = {n: value[n] for n in default if value[n] != default[n]}
      default = {}
    if value != default:
      changes[key] = value
  return changes


def source(config: Mapping, about: str) -> str:
  """Returns the text of a file of --config that has these keys.

  Args:
    about: its docstring.
  """
  lines = [
    f'"""{about}"""',
    '',
    'from ml_collections import ConfigDict',
    '',
    '',
    'def get_config():',
    '  config = ConfigDict()',
  ]
  for key, value in config.items():
    if isinstance(value, Mapping):
      rows = [f'    {name}={_python(v)},' for name, v in value.items()]
      lines += [f'  config.{key} = ConfigDict(dict(', *rows, '  ))']
    else:
      lines.append(f'  config.{key} = {_python(value)}')
  return '\n'.join([*lines, '  return config', ''])


def _python(value) -> str:
  """Returns a value as Python writes it; infinity has no literal."""
  return f"float('{value}')" if value in INFINITIES else repr(value)


class Parser(flags.ArgumentParser):
  """Parses the flag --config: reads the file, and locks its keys."""

  def parse(self, path: str):
    config = read(path)
    if isinstance(config, ml_collections.ConfigDict):
      config.lock()
    return config

  def flag_type(self) -> str:
    return 'config object'
