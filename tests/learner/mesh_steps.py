# SPDX-License-Identifier: Apache-2.0
"""Makes inner steps on the meshes that are asked for; prints losses as JSON.

Run in a process of its own by `test_device_meshes.py`: the number of devices
can't change within one. Arguments: 'decoder' or 'moe', then a word
fsdp×expert×tensor×accumulate, such as 2x1x2x1, per mesh.
"""

import json
import sys

import jax
import numpy as np

from diloco.config import run_config
from diloco.data import pipeline
from diloco.learner.programs import LearnerPrograms
from diloco.run.spec import make_run_spec
from experiments import tests_tiny

STEPS = 6
OPTIMIZERS = {'decoder': 'adamw', 'moe': 'muon'}


def losses(kind: str, fsdp: int, expert: int, tensor: int, parts: int) -> dict:
  """Losses of inner steps with a snapshot and a blend after each."""
  config = tests_tiny.get_config()
  config.model.update(kind=kind, heads=4, kv_heads=4, head_dim=8)
  # The balance of experts is of a part of the batch: no mean over its rows.
  config.model.update(experts=4, top_k=2, aux_weight=0.0)
  config.data.batch = 8
  config.inner.update(accumulate=parts, optimizer=OPTIMIZERS[kind])
  config.mesh.update(fsdp=fsdp, expert=expert, tensor=tensor)
  config.protocol.update(blend='interpolate', blend_alpha=0.5)
  run_spec = make_run_spec(run_config.build(config))
  programs = LearnerPrograms(run_spec, jax.devices()[: fsdp * expert * tensor])
  params, state = programs.init(run_spec.initial_parameters())
  theta = run_spec.initial_fragments()
  dataset = run_spec.dataset(0)
  found, sizes = [], []
  for i in range(STEPS):
    batch = programs.put_batch(pipeline.batch_at(dataset, 8 * i, 8))
    params, state, metrics = programs.step(params, state, batch, 0.01, (0, i))
    found.append(float(metrics['loss']))
    p = i % len(theta)
    snapshot = programs.snapshot(p, params)
    moved = sum(
      float(np.abs(np.asarray(snapshot[k]) - theta[p][k]).sum())
      for k in theta[p]
    )
    assert moved > 0, 'the snapshot is not of the parameters after the step'
    placed = programs.put_fragment(p, theta[p])
    params = programs.blend(p, params, placed, placed)
    for each in (*snapshot.values(), *placed.values()):
      sizes += [shard.data.size for shard in each.addressable_shards]
  shards = {
    path: x.addressable_shards[0].data.shape for path, x in params.items()
  }
  moments = jax.tree.leaves(state)
  return {
    'losses': found,
    'largest_shard': max(int(np.prod(s)) for s in shards.values()),
    'largest_exchanged_shard': max(sizes),
    'largest_moment_shard': max(
      int(np.prod(x.addressable_shards[0].data.shape)) for x in moments
    ),
  }


def main(kind: str, *meshes: str):
  found = {mesh: losses(kind, *map(int, mesh.split('x'))) for mesh in meshes}
  print(json.dumps(found))


if __name__ == '__main__':
  main(*sys.argv[1:])
