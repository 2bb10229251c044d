# SPDX-License-Identifier: Apache-2.0
"""Makes one step of a mixture of experts on meshes; prints it as JSON.

Run by `test_moe.py` in a process of its own: the number of devices can't
change within one. Arguments: fsdp, expert and tensor, a triple per mesh.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from diloco.models import api, sharding
from diloco.models.decoder import make_decoder
from diloco.models.decoder_config import DecoderConfig, ExpertsConfig

CONFIG = DecoderConfig(
  vocab=32,
  layers=2,
  d_model=16,
  heads=4,
  kv_heads=4,
  head_dim=8,
  d_ff=12,
  experts=ExpertsConfig(4, 2, bias_rate=0.125),
)


def step(model):
  """(params, batch) -> loss, metrics, gradients; to be jitted."""

  def gradient(params, batch):
    value = jax.value_and_grad(model.loss, has_aux=True)
    (loss, metrics), gradients = value(params, batch, jax.random.key(0))
    return loss, metrics, api.flatten(gradients)

  return gradient


def params_of(model) -> api.Params:
  """Drawn by numpy: `init` would be compiled."""
  rng = np.random.default_rng(0)
  return {
    path: (0.3 * rng.standard_normal(leaf.shape)).astype('f')
    for path, leaf in api.check_model(model).items()
  }


def batch() -> dict[str, jax.Array]:
  tokens = np.random.default_rng(1).integers(0, CONFIG.vocab, (4, 17))
  return {'tokens': jnp.asarray(tokens, jnp.int32)}


def on_mesh(fsdp: int, expert: int, tensor: int) -> dict:
  """Loss, metrics, gradients, and how much of each array a device holds."""
  model = make_decoder(CONFIG)
  shapes = {path: leaf.shape for path, leaf in api.check_model(model).items()}
  devices = jax.devices()[: fsdp * expert * tensor]
  mesh = sharding.make_mesh(fsdp, tensor, devices, expert=expert)
  places = sharding.param_shardings(model.axes, shapes, mesh)
  with jax.set_mesh(mesh):
    params = api.unflatten(jax.device_put(params_of(model), places))
    rows = jax.device_put(batch()['tokens'], sharding.batch_sharding(mesh))
    loss, metrics, gradients = jax.jit(
      step(model), out_shardings=(None, None, places)
    )(params, {'tokens': rows})
  return {
    'loss': float(loss),
    'metrics': {name: float(x) for name, x in metrics.items()},
    'gradients': {path: jnp.ravel(x).tolist() for path, x in gradients.items()},
    'held': {
      path: x.addressable_shards[0].data.size / x.size
      for path, x in gradients.items()
    },
  }


if __name__ == '__main__':
  sizes = [int(argument) for argument in sys.argv[1:]]
  meshes = zip(sizes[::3], sizes[1::3], sizes[2::3])
  print(json.dumps({'x'.join(map(str, m)): on_mesh(*m) for m in meshes}))
