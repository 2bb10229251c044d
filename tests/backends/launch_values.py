# SPDX-License-Identifier: Apache-2.0
"""Launches for the tests of the back ends, and their golden files."""

import pathlib

from diloco.config import hardware, run_config
from diloco.config.run_config import RunConfig
from experiments import quickstart, recipe
from launch.job import TPUS, JobOptions, JobSpec, launch

GOLDEN = pathlib.Path(__file__).parent / 'golden'
AWKWARD = "a b'c$(d)"  # What must survive every kind of quoting.
ASKED = {
  'workdir': '/workdir',
  'run_name': 'first',
  'image': 'example.org/diloco:1',
  'knows_peers': True,
  'has_token': True,
  'transfer_fenced': True,
  'restarts_max': 20,
}


def a_config(devices: int, learners: int = 2, **changes) -> RunConfig:
  """The quickstart with so many devices for each learner."""
  given = quickstart.get_config()
  given.protocol.learners = learners
  given.faults = ()
  given.run.compilation_cache = False
  given.transport.data_plane = 'grpc'
  given.mesh.fsdp = devices
  given.data.batch = 8 * devices
  given.update_from_flattened_dict(changes)
  return run_config.build(given)


def a_launch(
  *arguments, config=None, learners=2, mesh=0, shards=1, evaluated=0, **changes
) -> JobSpec:
  """Returns a launch of the quickstart, or of `config`.

  Args:
    arguments: further ones of the configuration.
    evaluated: rounds between evaluations.
    changes: of its options.
  """
  config = config or a_config(
    mesh or devices_of(**changes),
    learners,
    **{'syncer.shards': shards, 'run.eval_every_rounds': evaluated},
  )
  return launch(
    config,
    ['--config=experiments/quickstart.py', *arguments],
    ('quickstart.py', 'text of the configuration\n'),
    ['--token_file=/etc/diloco/secret/token'],
    ['--log_json'] if evaluated else [],
    JobOptions(**{**ASKED, **changes}),
  )


def a_sliced_launch(slices: int = 2, **changes) -> JobSpec:
  """Returns a launch of one learner of several slices."""
  devices = devices_of(**changes) // (slices if changes.get('hosts') else 1)
  config = a_config(
    devices, 1, **{'mesh.slices': slices, 'data.batch': 8 * devices * slices}
  )
  return a_launch(config=config, **changes)


def a_large_config(accelerator: str, shards=1, **changes) -> RunConfig:
  """Returns 5 B parameters, on so many devices a learner."""
  given = recipe.get_config('scale=5b,learners=4')
  given.data.path = 'unread'
  given.transport.data_plane = 'grpc'
  given.mesh.fsdp = devices_of(accelerator, **changes)
  given.syncer.shards = shards
  return run_config.build(given)


def a_large_launch(accelerator: str, shards=1, **changes) -> JobSpec:
  """Returns a launch of that configuration."""
  config = a_large_config(accelerator, shards, **changes)
  return a_launch(config=config, accelerator=accelerator, **changes)


def devices_of(accelerator='cpu', gpus_per_host=0, hosts=0, **_) -> int:
  if (name := hardware.canonical(accelerator)) in TPUS:
    chosen = TPUS[name]
    return chosen.hosts * chosen.chips_per_host
  return max(gpus_per_host, 1) * max(hosts, 1)


def check_golden(name: str, text: str, rewrite: bool) -> None:
  """Compares with a file; `--rewrite` writes it."""
  path = GOLDEN / name
  if rewrite:
    path.write_text(text)
  assert path.read_text() == text, f'{path} differs; look, then --rewrite'
