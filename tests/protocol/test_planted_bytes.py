# SPDX-License-Identifier: Apache-2.0
"""Other bytes under one version number are found."""

import pytest

from diloco.protocol.learner import bootstrap as learner_bootstrap
from diloco.protocol.values import replace_unchecked
from diloco.simulator import swarm as simulator_swarm
from diloco.simulator.cluster import Timing
from diloco.simulator.invariants import Violation
from diloco.simulator.scenario import Fault, Scenario
from tests.protocol.stages import config_of


def _believes_in_its_own_bytes(patch):
  original = learner_bootstrap.on_welcome

  def on_welcome(core, welcome):
    crcs = tuple(f.crc for f in core.state.fragments)
    original(core, replace_unchecked(welcome, crcs=crcs))

  patch.setattr(learner_bootstrap, 'on_welcome', on_welcome)


def _other_bytes_under_one_number() -> Scenario:
  """No seed of the first thousands draws it.

  Learner 1 is cut off while learner 0 goes on to later versions, and saves
  them. Both the syncer and learner 0 die; the syncer goes on from what learner
  1 has, under the number that was reached; before the next version is there,
  learner 0 comes back with its own bytes of that number.
  """
  ids = range(4)
  faults = [
    (6.0, 'partition', 'learner-1'),
    # Once version 9 is saved; the syncer merges 10.
    (20.9, 'kill', 'learner-0'),
    (21.1, 'kill', 'syncer'),
    (21.9, 'kill', 'syncer'),
    (22.0, 'partition', 'learner-1'),
    (26.1, 'kill', 'learner-0'),  # It starts again.
  ]
  return Scenario(
    seed=0,
    config=config_of(
      {
        'learners': 2,
        'fragments': 1,
        'sync_every_steps': 3,
        'patience': 0.3,
        'total_steps': 10_000,
      }
    ),
    timing=Timing(dict.fromkeys(ids, 0.3), merge_s=2.0),
    loss=0.0,
    checkpoint_rounds=10,
    checkpoint_steps=3,
    faults=tuple(Fault(0, *fault, notice_s=2.0) for fault in faults),
    shards=1,
    last_shard=0,
  )


def test_one_that_begins_with_other_bytes_is_found(monkeypatch):
  scenario = _other_bytes_under_one_number()
  simulator_swarm.Swarm(scenario).run()
  _believes_in_its_own_bytes(monkeypatch)
  with pytest.raises(Violation, match='5: begins with other bytes'):
    simulator_swarm.Swarm(scenario).run()
