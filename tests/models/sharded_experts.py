# SPDX-License-Identifier: Apache-2.0
"""Makes one step of a mixture of experts on meshes; prints it as JSON.

Run by `test_moe.py` in a process of its own: the number of devices can't
change within one. Arguments: fsdp, expert and tensor, a triple per mesh.
"""

import json
import re
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


LENGTH = 20  # It divides no size of a parameter.


def batch() -> dict[str, jax.Array]:
  tokens = np.random.default_rng(1).integers(0, CONFIG.vocab, (4, LENGTH + 1))
  return {'tokens': jnp.asarray(tokens, jnp.int32)}


def gathered(text: str, axis_size: int, stride: int) -> list[str]:
  """Returns the arrays of a compiled program that are gathered along an axis
  of the mesh: all whose devices are not known to have one place on it.

  Args:
    text: as `jax.stages.Compiled.as_text` gives it.
    axis_size: of the axis.
    stride: of the numbers of devices along it.
  """
  found = []
  for shape, groups in re.findall(
    r'= (\w+\[[\d,]*\])\S* all-gather\(.*?replica_groups=(.*?), (?:\w+=|$)',
    text,
  ):
    places = [
      {device // stride % axis_size for device in group}
      for group in groups_of(groups)
    ]
    if not places or max(map(len, places)) > 1:
      found.append(shape)
  return found


def groups_of(text: str) -> list[list[int]]:
  """Parses HLO's groups of devices; none where the form is unknown."""
  if text.startswith('{{'):
    return json.loads(text.replace('{', '[').replace('}', ']'))
  spread = re.fullmatch(r'\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', text)
  if not spread:
    return []
  to, by, order = (
    [int(x) for x in part.split(',')] if part else None
    for part in spread.groups()
  )
  devices = np.arange(np.prod(by)).reshape(by).transpose(order)
  return devices.reshape(to).tolist()


def on_mesh(fsdp: int, expert: int, tensor: int) -> dict:
  """Loss, metrics, gradients, what is gathered over 'expert', and how much of
  each array a device holds.
  """
  model = make_decoder(CONFIG)
  shapes = {path: leaf.shape for path, leaf in api.check_model(model).items()}
  devices = jax.devices()[: fsdp * expert * tensor]
  mesh = sharding.make_mesh(fsdp, tensor, devices, expert=expert)
  places = sharding.param_shardings(model.axes, shapes, mesh)
  with jax.set_mesh(mesh):
    params = api.unflatten(jax.device_put(params_of(model), places))
    rows = jax.device_put(batch()['tokens'], sharding.batch_sharding(mesh))
    jitted = jax.jit(step(model), out_shardings=(None, None, places))
    compiled = jitted.lower(params, {'tokens': rows}).compile()
    loss, metrics, gradients = compiled(params, {'tokens': rows})
  return {
    'gathered': gathered(compiled.as_text(), expert, stride=tensor),
    'loss': float(loss),
    'metrics': {name: float(x) for name, x in metrics.items()},
    'gradients': {path: jnp.ravel(x).tolist() for path, x in gradients.items()},
    'held': {
      path: x.addressable_shards[0].data.size / x.size
      for path, x in (gradients | {'tokens': rows}).items()
    },
  }


if __name__ == '__main__':
  sizes = [int(argument) for argument in sys.argv[1:]]
  meshes = zip(sizes[::3], sizes[1::3], sizes[2::3])
  print(json.dumps({'x'.join(map(str, m)): on_mesh(*m) for m in meshes}))
