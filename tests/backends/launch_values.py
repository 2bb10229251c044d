# SPDX-License-Identifier: Apache-2.0
"""A launch for the tests of the back ends, and their golden files."""

import dataclasses
import pathlib

from diloco.config import hardware, run_config
from diloco.config.run_config import RunConfig
from experiments import quickstart, recipe
from launch.job import TPUS, JobOptions, JobSpec, launch

GOLDEN = pathlib.Path(__file__).parent / 'golden'
AWKWARD = "a b'c$(d)"  # What must survive every kind of quoting.


def asked(**changes) -> JobOptions:
  values = {
    'workdir': '/shared/runs/first',
    'run_name': 'first',
    'knows_peers': True,
    'has_token': True,
    'transfer_fenced': True,
    'restarts_max': 20,
  }
  return JobOptions(**{**values, **changes})


def a_config(devices: int, learners: int = 2) -> RunConfig:
  """The quickstart with so many devices for each learner."""
  given = quickstart.get_config()
  given.protocol.learners = learners
  given.faults = ()
  given.run.compilation_cache = False
  given.transport.data_plane = 'grpc'
  given.mesh.fsdp = devices
  given.data.batch = 8 * devices
  return run_config.build(given)


def a_launch(*arguments, learners=2, mesh=0, **changes) -> JobSpec:
  """Returns a launch of the quickstart, with further configuration
  `arguments`.
  """
  return launch(
    a_config(mesh or _devices(**changes), learners),
    ['--config=experiments/quickstart.py', *arguments],
    'quickstart.py',
    'text of the configuration\n',
    ['--token_file=/etc/diloco/secret/token'],
    asked(**changes),
  )


def a_large_config(accelerator: str, shards=1, **changes) -> RunConfig:
  """Returns 5 B parameters, on so many devices a learner."""
  given = recipe.get_config('scale=5b,learners=4')
  given.data.path = 'unread'
  given.transport.data_plane = 'grpc'
  given.mesh.fsdp = _devices(accelerator, **changes)
  given.syncer.shards = shards
  return run_config.build(given)


def a_large_launch(accelerator: str, shards=1, **changes) -> JobSpec:
  """Returns a launch of that configuration."""
  return launch(
    a_large_config(accelerator, shards, **changes),
    ['--config=experiments/recipe.py:scale=5b'],
    'recipe.py',
    'text of the configuration\n',
    ['--token_file=/etc/diloco/secret/token'],
    asked(accelerator=accelerator, **changes),
  )


def an_evaluated_launch(shards=1, **changes) -> JobSpec:
  """Returns a launch whose Θ is evaluated while it goes on."""
  given = a_config(_devices(**changes))
  given = dataclasses.replace(
    given,
    run=dataclasses.replace(given.run, eval_every_rounds=16),
    syncer=dataclasses.replace(given.syncer, shards=shards),
  )
  values = {'workdir': '/workdir', 'image': 'example.org/diloco:1'}
  return launch(
    given,
    ['--config=experiments/quickstart.py'],
    'quickstart.py',
    'text of the configuration\n',
    ['--token_file=/etc/diloco/secret/token', '--log_json'],
    asked(**{**values, **changes}),
  )


def a_slice_launch(*arguments, **changes) -> JobSpec:
  """Returns the same on TPU VMs, each learner a spot slice of one host."""
  values = {
    'accelerator': 'v5litepod-8',
    'capacity': 'spot',
    'workdir': '/workdir',
    'image': 'example.org/diloco:1',
  }
  return a_launch(*arguments, **{**values, **changes})


def _devices(accelerator='cpu', gpus_per_host=0, hosts=0, **_) -> int:
  if (name := hardware.canonical(accelerator)) in TPUS:
    chosen = TPUS[name]
    return chosen.hosts * chosen.chips_per_host
  return max(gpus_per_host, 1) * max(hosts, 1)


def check_golden(name: str, text: str, rewrite: bool) -> None:
  """Compares with a file; `--rewrite` writes it."""
  path = GOLDEN / name
  if rewrite:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
  assert path.read_text() == text, f'{path} differs; look, then --rewrite'
