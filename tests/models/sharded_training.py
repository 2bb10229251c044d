# SPDX-License-Identifier: Apache-2.0
"""Trains three steps on a mesh and prints what came out, as JSON.

Run by `test_sharding.py` in a process of its own: the number of devices can't
change within one. Arguments: for each mesh its sizes, and what computes
attention, such as 4x1x1:xla.
"""

import dataclasses
import json
import re
import sys

import jax
import jax.numpy as jnp

from diloco.models import api, sharding
from diloco.models.decoder import make_decoder
from diloco.models.decoder_config import DecoderConfig

CONFIG = DecoderConfig(
  vocab=32,
  layers=3,
  d_model=16,
  heads=4,
  kv_heads=4,
  head_dim=8,
  d_ff=24,
  remat='dots',
)
LEARNING_RATE = 0.5
STEPS = 3


def make_step(model):
  """(params, batch) -> params after one step of SGD, loss."""

  def step(params, batch):
    value = jax.value_and_grad(model.loss, has_aux=True)
    (loss, _), gradients = value(params, batch, jax.random.key(0))
    return jax.tree.map(_descend, params, gradients), loss

  return step


def _descend(param, gradient):
  return param - LEARNING_RATE * gradient


def train(attention: str, fsdp: int, tensor: int, context: int) -> dict:
  """Losses, parameters and where they lie after three steps of plain SGD."""
  model = make_decoder(dataclasses.replace(CONFIG, attention=attention))
  shapes = {path: leaf.shape for path, leaf in api.check_model(model).items()}
  devices = jax.devices()[: fsdp * tensor * context]
  mesh = sharding.make_mesh(fsdp, tensor, devices, context=context)
  places = sharding.param_shardings(model.axes, shapes, mesh)
  rows = sharding.batch_sharding(mesh)
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  tree = api.unflatten(places)
  with jax.set_mesh(mesh):
    params = jax.jit(model.init, out_shardings=tree)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (8, 17), 0, CONFIG.vocab)
    batch = {'tokens': jax.device_put(tokens, rows)}
    compiled = (
      jax.jit(
        make_step(model),
        in_shardings=(tree, {'tokens': rows}),
        out_shardings=(tree, whole),
        donate_argnums=0,
      )
      .lower(params, batch)
      .compile()
    )
    losses = []
    for _ in range(STEPS):
      given = params
      params, loss = compiled(params, batch)
      losses.append(float(loss))

  flat = api.flatten(params)
  return {
    'losses': losses,
    'params': {path: jnp.ravel(x).tolist() for path, x in flat.items()},
    'shapes': shapes,
    'shard_shapes': {
      path: sorted({shard.data.shape for shard in leaf.addressable_shards})
      for path, leaf in flat.items()
    },
    'devices': {path: len(leaf.devices()) for path, leaf in flat.items()},
    'donated': all(x.is_deleted() for x in api.flatten(given).values()),
    'gathered': gathered(compiled.as_text()),
    'axis_types': [str(kind) for kind in mesh.axis_types],
  }


def gathered(text: str) -> list[list[int]]:
  """Shapes that the all-gathers of a compiled program give out."""
  shapes = re.findall(r'= \w+\[([\d,]*)\][^ ]* all-gather', text)
  return sorted({tuple(map(int, s.split(','))) for s in shapes if s})


if __name__ == '__main__':
  results = {}
  for asked in sys.argv[1:]:
    of_mesh, _, name = asked.partition(':')
    results[asked] = train(name, *map(int, of_mesh.split('x')))
  print(json.dumps(results))
