# SPDX-License-Identifier: Apache-2.0
"""Training on four devices is training on one; and what is refused."""

import json
import math
import pathlib
import runpy

import jax
import numpy as np
import pytest

from diloco.models import api, sharding
from diloco.models.decoder import make_decoder
from tests.commands import ROOT, python

SCRIPT = pathlib.Path(__file__).parent / 'sharded_training.py'
# What LLVM makes of it is not looked at, and takes a minute.
FLAG, LEVEL = 'xla_backend_optimization_level', 0
# fsdp, tensor and context, and what computes attention.
MESHES = ('4x1x1:xla', '2x2x1:xla', '2x1x2:xla', '1x2x2:splash')


@pytest.fixture(scope='module')
def on_four():
  """Returns what the script prints in a process with four devices."""
  done = python(
    *(SCRIPT, *MESHES),
    JAX_ENABLE_COMPILATION_CACHE='false',  # The partitioner is to speak.
    JAX_NUM_CPU_DEVICES='4',
    JAX_PLATFORMS='cpu',
    PYTHONPATH=str(ROOT),
    XLA_FLAGS=f'--{FLAG}={LEVEL}',
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout) | {'stderr': done.stderr}


@pytest.fixture(scope='module')
def on_one():
  """Losses and parameters of the same steps, jitted without any mesh."""
  script = runpy.run_path(str(SCRIPT))
  config = script['CONFIG']
  model = make_decoder(config)
  tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, config.vocab)
  options = {FLAG: LEVEL}
  params = jax.jit(model.init, compiler_options=options)(jax.random.key(0))
  step = jax.jit(script['make_step'](model), compiler_options=options)
  losses = []
  for _ in range(script['STEPS']):
    params, loss = step(params, {'tokens': tokens})
    losses.append(float(loss))
  return losses, api.flatten(params)


@pytest.mark.parametrize('mesh', MESHES)
def test_four_devices_train_as_one(mesh, on_one, on_four):
  losses, params = on_one
  assert losses[-1] < losses[0] - 0.1, f'nothing was learned: {losses}'
  rtol = 1e-6 if mesh.endswith('xla') else 1e-5
  np.testing.assert_allclose(on_four[mesh]['losses'], losses, rtol=rtol)
  assert on_four[mesh]['params'].keys() == params.keys()
  for path, leaf in params.items():
    np.testing.assert_allclose(
      on_four[mesh]['params'][path],
      np.ravel(leaf),
      rtol=10 * rtol,
      atol=rtol,
      err_msg=path,
    )


@pytest.mark.parametrize('mesh', MESHES)
def test_parameters_lie_in_shards_after_a_step(mesh, on_four):
  report = on_four[mesh]
  for path, shape in report['shapes'].items():
    (shard,) = report['shard_shapes'][path]
    assert report['devices'][path] == 4, path
    # Along 'context' they are copied.
    cut = math.prod(map(int, mesh.partition(':')[0].split('x')[:2]))
    parts = 1 if path.endswith('norm') else cut
    assert parts * np.prod(shard) == np.prod(shape), f'{path}: {shard=}'


@pytest.mark.parametrize('mesh', MESHES)
def test_no_device_gathers_more_than_one_layer(mesh, on_four):
  layers = on_four[mesh]['shapes']['layers/mlp/up'][0]
  stacked = [s for s in on_four[mesh]['gathered'] if s[0] == layers]
  assert not stacked, f'all-gather over whole stacks of layers: {stacked}'


def test_fsdp_gathers_layer_by_layer(on_four):
  # Else the test above would pass for a program that says it otherwise.
  assert [16, 48] in on_four['4x1x1:xla']['gathered']  # Gate and up in one.


@pytest.mark.parametrize('mesh', MESHES)
def test_given_parameters_are_donated(mesh, on_four):
  assert on_four[mesh]['donated']


def test_the_partitioner_never_gives_up(on_four):
  assert 'Involuntary full rematerialization' not in on_four['stderr']


def test_a_mesh_that_does_not_fit_is_refused():
  devices = jax.devices()[:1]
  text = "'context': 1, 'tensor': 2} needs 8 devices, there are 1"
  with pytest.raises(ValueError, match=text):
    sharding.make_mesh(4, 2, devices)
  with pytest.raises(ValueError, match=r"'fsdp': 0, .*'tensor': 1}, all must"):
    sharding.make_mesh(0, 1, devices)


def _abstract_mesh(fsdp, tensor):
  return jax.sharding.AbstractMesh((fsdp, tensor), ('fsdp', 'tensor'))


def test_an_axis_that_does_not_divide_is_refused():
  text = "a/up: axis 'mlp' of size 6 is not divisible by the 4 devices of mesh"
  with pytest.raises(ValueError, match=text):
    sharding.param_shardings(
      {'a/up': ('embed', 'mlp')}, {'a/up': (8, 6)}, _abstract_mesh(2, 4)
    )


@pytest.mark.parametrize(
  ('names', 'text'),
  [
    (('embed', 'wings'), "p: no rule for the axis 'wings'"),
    (('embed', 'embed'), "use mesh axis 'fsdp' more than once"),
    (('embed',), 'do not fit the shape'),
  ],
)
def test_a_wrong_table_is_refused(names, text):
  with pytest.raises(ValueError, match=text):
    sharding.param_shardings({'p': names}, {'p': (4, 4)}, _abstract_mesh(2, 2))
