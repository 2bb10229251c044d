# SPDX-License-Identifier: Apache-2.0
"""Starts a run on other machines, in a cloud or a cluster.

  python -m launch.main --config=experiments/NAME.py --workdir=DIR \\
    --to=BACKEND [--dry_run] …
  python -m launch.main add-learner --learner=3 …the same flags…
  python -m launch.main remove-learner --learner=3 …the same flags…

launch/README.md has the steps; `launch.local` starts a run here. Exit code 0:
it was done; 1: a command failed, which is named; 78: it can't be done as
configured; 130: Ctrl-C.
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Iterator

from absl import flags as absl_flags

from diloco.config import flags, unlike
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from launch import job
from launch.backends import BACKENDS
from launch.backends.base import CommandFailed, seeing
from launch.job import CONTAINERS, CPU, GPU, SECRET_FOLDER, JobOptions, JobSpec

START = 'start'
ADD = 'add-learner'
REMOVE = 'remove-learner'
COMMANDS = (START, ADD, REMOVE)
IN_CONTAINERS = tuple(n for n, b in BACKENDS.items() if CONTAINERS in b.TRAITS)
_DEFINE = {
  str: absl_flags.DEFINE_string,
  bool: absl_flags.DEFINE_bool,
  int: absl_flags.DEFINE_integer,
  type(None): absl_flags.DEFINE_integer,
  tuple: absl_flags.DEFINE_multi_string,
}


def options_of(owner: type) -> dict[str, dataclasses.Field]:
  """Returns the fields of a dataclass that are flags, by name."""
  fields = dataclasses.fields(owner)
  return {field.name: field for field in fields if 'trait' in field.metadata}


def _takers() -> dict[str, tuple[str, ...]]:
  """Returns which targets take a flag; to others it would say nothing."""
  takers = {}
  for name, field in options_of(JobOptions).items():
    trait = field.metadata['trait']
    takers[name] = tuple(
      n for n, b in BACKENDS.items() if not trait or trait in b.TRAITS
    )
  for target, backend in BACKENDS.items():
    for name in options_of(backend):
      takers[name] = (*takers.get(name, ()), target)
  return takers


def define_flags() -> None:
  """The flags of this main."""
  flags.define_flags()
  flags.define_access_flags()
  flags.define_log_flags()
  where = (f'{n}: {b.__doc__.splitlines()[0]}' for n, b in BACKENDS.items())
  absl_flags.DEFINE_enum('to', None, BACKENDS, ' '.join(where))
  absl_flags.DEFINE_bool(
    'dry_run', False, 'Prints the commands and manifests, and starts nothing.'
  )
  absl_flags.DEFINE_integer(
    'learner', None, 'Id of the learner that is added or removed.'
  )
  for target, owner in ((None, JobOptions), *BACKENDS.items()):
    for name, field in options_of(owner).items():
      text = field.metadata['help']
      text = f'{target}: {text}' if target else text
      if choices := field.metadata['choices']:
        absl_flags.DEFINE_enum(name, field.default, choices, text)
      else:
        _DEFINE[type(field.default)](name, field.default, text)


def read_launch(config: RunConfig) -> JobSpec:
  """The launch that the parsed flags ask for.

  Raises:
    ConfigError: it can not be.
  """
  values = absl_flags.FLAGS
  if problems := [*_wrong_for_target(config), *_wrong_files(values)]:
    raise ConfigError(problems)
  path = pathlib.Path(flags.config_file())
  arguments = flags.arguments()
  if values.to in IN_CONTAINERS and path.is_file():  # It goes along.
    arguments[0] = arguments[0].replace(
      str(flags.config_file()), f'{job.CONFIG_FOLDER}/{path.name}', 1
    )
  access = flags.access_files()
  asked = JobOptions(
    python='python' if values.to in IN_CONTAINERS else sys.executable,
    secret_files=tuple(p.name for _, p in _files()) if values.secret else (),
    knows_peers=bool(access['tls_ca'] or access['token_file']),
    has_token=bool(access['token_file']),
    **flags.access_vouched(),
    **{name: getattr(values, name) for name in options_of(JobOptions)},
  )
  return job.launch(
    config,
    arguments,
    (path.name, path.read_text() if path.is_file() else ''),
    flags.access_arguments(),
    flags.log_arguments(),
    asked,
  )


def _wrong_for_target(config: RunConfig) -> Iterator[str]:
  """Flags that are missing, or that the back end would ignore."""
  values = absl_flags.FLAGS
  backend, takers = BACKENDS[values.to], _takers()
  asked = {name: values[name].value for name in takers if values[name].present}
  asked_by = {'': {'accelerator': values.accelerator, **asked}}
  for _, who, machines in unlike.for_each_kind(
    config, config.data.shards, lambda setup: setup.machines
  ):
    asked_by[f'{who}: '] = machines
  for who, options in asked_by.items():
    for name in options:
      if values.to not in takers[name]:
        where = ' and --to='.join(takers[name])
        yield f'{who}--{name}: is for --to={where} only'
    is_tpu = (chosen := options.get('accelerator', CPU)) not in (CPU, GPU)
    if 'accelerator' in options and backend.TPUS not in (None, is_tpu):
      known = 'TPUs, such as v5litepod-8' if backend.TPUS else 'cpu and gpu'
      yield f'{who}--accelerator={chosen}: --to={values.to} takes {known}'
  image = ['image'] if values.to in IN_CONTAINERS else []
  for name in ('workdir', *image, *backend.NEEDS):
    if not getattr(values, name):
      yield f'--{name}: is missing, --to={values.to} needs it'


def _files() -> list[tuple[str, pathlib.PurePath]]:
  """Returns the files of the flags for access, by flag."""
  values = flags.access_files().items()
  return [
    (name, pathlib.PurePath(value))
    for name, value in values
    if name != 'tls_name' and value is not None
  ]


def _wrong_files(values) -> Iterator[str]:
  """Yields files that are not in the secret: a container has no others."""
  secret = pathlib.PurePath(SECRET_FOLDER)
  for name, path in _files() if values.to in IN_CONTAINERS else ():
    if not values.secret or path.parent != secret:
      yield (
        f'--{name}={path}: in a container there are the files of --secret, '
        f'in {SECRET_FOLDER}'
      )


def _perform(command: str, config: RunConfig) -> int:
  values, say = absl_flags.FLAGS, functools.partial(print, flush=True)
  whole, kind = read_launch(config), BACKENDS[values.to]
  own = {name: getattr(values, name) for name in options_of(kind)}
  backend = kind(dry_run=values.dry_run, say=say, **own)
  if problems := [*backend.problems()]:
    raise ConfigError(problems)
  whole = seeing(whole, backend.shares_workdir)
  notes = [*backend.notes()]
  if config.faults:
    notes.append('config.faults is for `diloco local`; nothing is killed here')
  for line in notes:
    print(f'note: {line}', file=sys.stderr)
  if command == START:
    return backend.start(whole)
  act = backend.add if command == ADD else backend.remove
  return act(whole, values.learner)


def main(argv) -> int:
  config, values = flags.load(), absl_flags.FLAGS
  command = argv[1] if len(argv) > 1 else START
  if command not in COMMANDS or len(argv) > 2:
    known = ', '.join(COMMANDS)
    raise ConfigError([f'{" ".join(argv[1:])}: must be one of {known}'])
  if (values.learner is not None) != (command in (ADD, REMOVE)):
    raise ConfigError(['--learner: is for add-learner and remove-learner'])
  if values.to is None:
    known = ', '.join(BACKENDS)
    raise ConfigError(
      [f'--to: is missing, one of {known}; `diloco local` starts a run here']
    )
  try:
    return _perform(command, config)
  except CommandFailed as error:
    print(f'error: {error}', file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print('stopped by SIGINT; what was started goes on', file=sys.stderr)
    return 130


if __name__ == '__main__':
  define_flags()
  flags.run(main)
