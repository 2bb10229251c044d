# SPDX-License-Identifier: Apache-2.0
"""The flags of launch.main, and the launch that they ask for."""

import pathlib
import sys
from collections.abc import Iterator

from absl import flags as absl_flags

from diloco.config import flags
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from launch.backends.gke import CONFIG_FOLDER, SECRET_FOLDER
from launch.backends.registry import BACKENDS
from launch.job import (
  CAPACITIES,
  CPU,
  GPU,
  NAMES,
  ON_DEMAND,
  JobOptions,
  JobSpec,
  launch,
)
from launch.program import hosts_of_all

LOCAL = 'local'
TARGETS = (LOCAL, *BACKENDS)
IN_CONTAINERS = tuple(n for n, kind in BACKENDS.items() if kind.in_containers)

# Name: help. The fields of `JobOptions` of the same names, with their defaults.
TEXTS = {
  'run_name': "Name of the run on the back end; default: the config's.",
  'accelerator': f'Accelerator of each learner: {", ".join(NAMES)}.',
  'reservation': 'Name of the reservation, with --capacity=reservation.',
  'image': 'Container image with this repository as working directory.',
  'results_bucket': (
    'Bucket of Cloud Storage to which all roles copy metrics and results.'
  ),
  'secret': (
    f'Secret whose files are mounted at {SECRET_FOLDER}; {{role}} in it '
    "becomes 'syncer', 'learner-0', …"
  ),
}
INTEGERS = {
  'gpus_per_host': 'GPUs of each host, with --accelerator=gpu.',
  'learner_cpus': "CPUs of each learner's host; 0: no request.",
  'learner_memory_gib': "Memory of a learner's host; 0: no request.",
  'syncer_cpus': "CPUs of the syncer's host; 0: as diloco.plan says.",
  'syncer_memory_gib': "Memory of the syncer's host; 0: likewise.",
  'storage_gib': "Size of the syncer's volume or disk; 0: likewise.",
  'port': 'Port that the syncer listens on.',
  'restarts_max': 'Restarts of each role before it is given up.',
  'notice_s': 'Seconds from SIGTERM in which a learner leaves.',
}
# Given to another back end, a flag is refused: it would be ignored.
BACKENDS_OF = {
  **dict.fromkeys((*TEXTS, *INTEGERS, 'learners_at_first'), tuple(BACKENDS)),
  **dict.fromkeys(
    ('image', 'secret', 'storage_gib', 'results_bucket'), IN_CONTAINERS
  ),
  **dict.fromkeys(('capacity', 'reservation'), IN_CONTAINERS),
  # Machines with TPUs are had as they are.
  **dict.fromkeys(
    ('learner_cpus', 'learner_memory_gib', 'gpus_per_host'),
    tuple(name for name, kind in BACKENDS.items() if not kind.tpus),
  ),
  **dict.fromkeys(
    (
      'overwrite',
      'cpu_devices',
      'chips_per_learner',
      'device_root',
      'page',
    ),
    (LOCAL,),
  ),
  'page_port': (LOCAL, 'gke'),
  **{flag: (name,) for name, kind in BACKENDS.items() for flag in kind.flags},
}
NEEDED_BY = {
  'workdir': TARGETS,
  'image': IN_CONTAINERS,
  **{flag: (name,) for name, kind in BACKENDS.items() for flag in kind.needs},
}
_DEFINE = {
  str: absl_flags.DEFINE_string,
  bool: absl_flags.DEFINE_bool,
  int: absl_flags.DEFINE_integer,
  list: absl_flags.DEFINE_multi_string,
}


def define_flags() -> None:
  """Besides those of launch.local."""
  absl_flags.DEFINE_enum('to', LOCAL, TARGETS, 'Where the run is started.')
  absl_flags.DEFINE_bool(
    'dry_run', False, 'Prints the commands and manifests, and starts nothing.'
  )
  absl_flags.DEFINE_integer(
    'learner', None, 'Id of the learner that is added or removed.'
  )
  absl_flags.DEFINE_integer(
    'learners_at_first',
    None,
    "Learners that start with the syncer; default: the config's.",
  )
  absl_flags.DEFINE_enum(
    'capacity',
    ON_DEMAND,
    CAPACITIES,
    'Kind of capacity that the learners run on.',
  )
  for name, text in {**TEXTS, **INTEGERS}.items():
    default = getattr(JobOptions, name)
    _DEFINE[type(default)](name, default, text)
  for backend, kind in BACKENDS.items():
    for name, (default, text) in kind.flags.items():
      _DEFINE[type(default)](name, default, f'{backend}: {text}')


def read_launch(config: RunConfig) -> JobSpec:
  """The launch that the parsed flags ask for.

  Raises:
    ConfigError: it can not be.
  """
  given = absl_flags.FLAGS
  if problems := [*wrong_for_backend(), *_wrong_files(given)]:
    raise ConfigError(problems)
  path = pathlib.Path(flags.config_file())
  arguments = flags.arguments()
  if given.to in IN_CONTAINERS:  # The file goes along.
    arguments[0] = arguments[0].replace(
      str(flags.config_file()), f'{CONFIG_FOLDER}/{path.name}', 1
    )
  access = flags.access_files()
  vouched = flags.access_vouched()
  asked = JobOptions(
    workdir=given.workdir,
    at_first=given.learners_at_first,
    hosts=hosts_of_all(given.hosts) if given['hosts'].present else 0,
    capacity=given.capacity,
    python='python' if given.to in IN_CONTAINERS else sys.executable,
    metrics_port=given.metrics_port,
    secret_files=_secret_files() if given.secret else (),
    knows_peers=bool(access['tls_ca'] or access['token_file']),
    has_token=bool(access['token_file']),
    **vouched,
    **{name: getattr(given, name) for name in (*TEXTS, *INTEGERS)},
  )
  return launch(
    config,
    arguments,
    path.name,
    path.read_text(),
    [*flags.access_arguments(), *flags.log_arguments()],
    asked,
  )


def wrong_for_backend() -> Iterator[str]:
  """Flags that are missing, or that the back end would ignore."""
  given = absl_flags.FLAGS
  for name, backends in BACKENDS_OF.items():
    if given[name].present and given.to not in backends:
      yield f'--{name}: is for --to={" and --to=".join(backends)} only'
  for name, backends in NEEDED_BY.items():
    if given.to in backends and not getattr(given, name):
      yield f'--{name}: is missing, --to={given.to} needs it'
  is_tpu = given.accelerator not in (CPU, GPU)
  tpus = BACKENDS[given.to].tpus if given.to in BACKENDS else None
  if tpus is False and is_tpu:
    yield (
      f'--accelerator={given.accelerator}: --to={given.to} takes cpu and gpu'
    )
  if tpus and not is_tpu:
    yield (
      f'--accelerator={given.accelerator}: --to={given.to} takes TPUs, such '
      'as v5litepod-8'
    )
  if given.shared_claim and (
    given.storage_class or given['storage_gib'].present
  ):
    yield '--shared_claim: is there already, it has its size and class'


def _wrong_files(given):
  """Yields files that are not in the secret: a container has no others."""
  if given.to not in IN_CONTAINERS:
    return
  for name, value in flags.access_files().items():
    if name == 'tls_name' or value is None:
      continue
    if not given.secret or pathlib.PurePath(value).parent != pathlib.PurePath(
      SECRET_FOLDER
    ):
      yield (
        f'--{name}={value}: in a container there are the files of --secret, '
        f'in {SECRET_FOLDER}'
      )


def _secret_files() -> tuple[str, ...]:
  files = flags.access_files()
  return tuple(
    pathlib.PurePath(value).name
    for name, value in files.items()
    if name != 'tls_name' and value is not None
  )
