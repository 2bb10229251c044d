# SPDX-License-Identifier: Apache-2.0
"""Makes inner steps on the meshes that are asked for; prints losses as JSON.

Run in a process of its own by `test_device_meshes.py`: the number of devices
can't change within one. Arguments: 'decoder', 'moe' or 'lora', then a word
fsdp×expert×tensor×accumulate, such as 2x1x2x1, per mesh. They begin with
weights in a folder of Hugging Face.
"""

import json
import pathlib
import sys
import tempfile

import jax
import numpy as np

from diloco.checkpoint.safetensors_files import write_exported
from diloco.config import run_config
from diloco.data import pipeline
from diloco.learner.programs import LearnerPrograms
from diloco.learner.restore import initial_replicas
from diloco.models.hf_format import Tensors, exported_config
from diloco.run.spec import decoder_config, make_run_spec
from diloco.syncer.outer_state import OuterState
from experiments import tests_tiny

STEPS = 6
OPTIMIZERS = {'decoder': 'adamw', 'moe': 'muon', 'lora': 'adamw'}


def _config(kind: str):
  config = tests_tiny.get_config()
  config.model.update(heads=4, kv_heads=4, head_dim=8)
  # The balance of experts is of a part of the batch: no mean over its rows.
  config.model.update(experts=4, top_k=2, aux_weight=0.0)
  config.data.batch = 8
  if kind == 'moe':
    config.model.kind = kind
  return config


def write_weights(folder: pathlib.Path, kind: str):
  """Writes what the runs begin with, as other tools have it."""
  run_spec = make_run_spec(run_config.build(_config(kind)))
  drawn = run_spec.initial_parameters()
  sizes = decoder_config(run_spec.config)
  tensors = Tensors(sizes).exported({k: x * 1.25 for k, x in drawn.items()})
  settings = exported_config(sizes, 32, 0, '')
  write_exported(folder, tensors, {'config.json': settings})


def losses(
  folder, kind: str, fsdp: int, expert: int, tensor: int, parts: int
) -> dict:
  """Losses of inner steps with a snapshot and a blend after each."""
  config = _config(kind)
  config.inner.update(accumulate=parts, optimizer=OPTIMIZERS[kind])
  config.mesh.update(fsdp=fsdp, expert=expert, tensor=tensor)
  config.protocol.update(blend='interpolate', blend_alpha=0.5)
  config.model.init_from = f'hf:{folder}'
  config.model.lora_rank = 8 if kind == 'lora' else 0
  run_spec = make_run_spec(run_config.build(config))
  programs = LearnerPrograms(run_spec, jax.devices()[: fsdp * expert * tensor])
  params, state = programs.draw()
  replicas = initial_replicas(run_spec, programs, params)
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
    'crcs': [replica.crc for replica in replicas],
    'crcs_of_the_syncer': OuterState(run_spec).crcs(),
    'largest_shard': max(int(np.prod(s)) for s in shards.values()),
    'largest_exchanged_shard': max(sizes),
    'largest_moment_shard': max(
      int(np.prod(x.addressable_shards[0].data.shape)) for x in moments
    ),
  }


def main(kind: str, *meshes: str):
  with tempfile.TemporaryDirectory() as folder:
    write_weights(pathlib.Path(folder), kind)
    found = {
      mesh: losses(folder, kind, *map(int, mesh.split('x'))) for mesh in meshes
    }
  print(json.dumps(found))


if __name__ == '__main__':
  main(*sys.argv[1:])
