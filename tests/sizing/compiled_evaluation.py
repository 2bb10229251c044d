# SPDX-License-Identifier: Apache-2.0
"""Prints what evaluating 12 B takes of each chip of a v5e-8, as JSON.

Run by `test_compiled_shapes.py` in a process of its own. It compiles the
held-out loss, and a token more of 8 texts with their caches.
"""

import json

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from diloco.config import hardware, run_config
from diloco.models import api
from diloco.run import on_devices
from diloco.run.spec import make_run_spec
from diloco.sizing import estimate
from experiments import recipe

ROWS = 8


def chip_bytes(lowered) -> int:
  """Returns arguments and temporaries of a chip."""
  needs = lowered.compile().memory_analysis()
  return needs.argument_size_in_bytes + needs.temp_size_in_bytes


if __name__ == '__main__':
  raw = recipe.get_config('scale=12b')
  raw.data.path = 'is not read'
  config = run_config.build(raw)
  slice_ = hardware.topology('v5litepod-8')
  devices = estimate.described(slice_, 'tpu').devices
  run_spec = make_run_spec(config, reads_text=False)
  placed = on_devices.of_run(run_spec, devices)
  model, length = run_spec.model, config.data.seq_len

  def rows(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=placed.spread(shape))

  params = {
    path: jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=place)
    for (path, spec), place in zip(
      run_spec.specs.items(), placed.shardings.values(), strict=True
    )
  }

  def loss(params, batch):
    return model.loss(api.unflatten(params), batch, jax.random.key(0))[0]

  def start(params, *asked):
    return model.language.start(api.unflatten(params), *asked)

  def go_on(params, *asked):
    return model.language.go_on(api.unflatten(params), *asked)

  with jax.set_mesh(placed.mesh):
    asked = rows(ROWS, length), rows(ROWS)
    _, cache = jax.eval_shape(start, params, *asked)
    by_row = NamedSharding(placed.mesh, PartitionSpec(None, ('fsdp', 'expert')))
    cache = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        x.shape,
        x.dtype,
        sharding=by_row if x.ndim > 1 else placed.spread(x.shape),
      ),
      cache,
    )
    found = {
      'loss': jax.jit(loss).lower(params, {'tokens': rows(ROWS, length + 1)}),
      'go_on': jax.jit(go_on, donate_argnums=2).lower(
        params, rows(ROWS), cache
      ),
    }
  print(json.dumps({name: chip_bytes(each) for name, each in found.items()}))
