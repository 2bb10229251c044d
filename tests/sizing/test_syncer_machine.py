# SPDX-License-Identifier: Apache-2.0
"""Launchers ask for a syncer what the planner says of it."""

import dataclasses

import pytest

from diloco.config import run_config
from diloco.run.spec import make_run_spec
from diloco.sizing import memory
from diloco.sizing.memory import machine, of_config, of_layout
from experiments import recipe

GIB = 2**30


def _config(**changes):
  given = recipe.get_config('scale=5b,learners=4')
  given.data.path = 'unread'
  given.update_from_flattened_dict(changes)
  return run_config.build(given)


def test_by_hand():
  # One round in flight of four learners; two checkpoints, and one in progress.
  found = machine(n=1e9, f=1e8, b=0.5, ahead=1, learners=4)
  held = 12e9 + 4 * 4e8 + 6 * 4e8 + 4 * 0.5e8 + 8 * 0.5e9 + 4e9
  assert found.memory_gib == -(-held // GIB)
  assert found.disk_gib == -(-(3 * 12e9 + 4e9 + 30e9) // GIB)


@pytest.mark.parametrize(
  'changes',
  [
    {},
    {'model.tied': True, 'syncer.shards': 3, 'fragments.embedding': 'own'},
    {
      'outer.optimizer': 'adam',
      'outer.anneal_fraction': 0.0,
      'run.eval_every_rounds': 16,
    },
  ],
)
def test_without_jax_it_is_that_of_the_model_itself(changes):
  config = _config(**changes)
  layout = make_run_spec(config, reads_text=False).layout
  assert of_config(config) == of_layout(config, layout)


def test_a_syncer_of_5_billion():
  found = of_config(_config())
  assert 98 < found.memory_gib < 108
  assert found.disk_gib > 3 * 56  # Checkpoints of 12 bytes a parameter.


def test_shards_share_it():
  whole, shard = (
    of_config(_config()),
    of_config(_config(**{'syncer.shards': 4})),
  )
  assert shard.shards == 4
  assert shard.memory_gib < 0.7 * whole.memory_gib  # F does not shrink.
  text = '\n'.join(memory.machine_lines(shard))
  assert 'each of its 4 machines: 4 CPUs, ' in text


def test_many_learners_take_more_cpus():
  few = machine(1e6, 1e5, 0.5, 1, learners=9)
  many = machine(1e6, 1e5, 0.5, 1, learners=10)
  assert (few.cpus, many.cpus) == (4, 6)
  assert dataclasses.replace(few, cpus=64).memory_gib == 64


def test_the_size_of_a_model_of_ones_own_is_not_known():
  config = _config(**{'model.kind': 'experiments.own_model:make'})
  assert of_config(config) is None
