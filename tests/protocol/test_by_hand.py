# SPDX-License-Identifier: Apache-2.0
"""Machines that are talked to by hand decide as those of a cluster do."""

import pytest

import diloco
from diloco.protocol import messages
from diloco.protocol.syncer import events as syncer_events
from diloco.simulator.by_hand import SYNCER
from diloco.simulator.observer import Observer

CONFIG = diloco.ProtocolConfig(
  learners=2, fragments=2, sync_every_steps=4, overlap_steps=2, quorum=2
)
STEPS = 9


def _merged(effects) -> list:
  return [
    (e.round, [s.learner for s in e.shares])
    for e in effects
    if isinstance(e, syncer_events.Merge)
  ]


class _Merges(Observer):
  def __init__(self):
    self.found = []

  def at_syncer(self, syncer, event, effects):
    self.found += _merged(effects)


def test_it_closes_the_rounds_that_a_cluster_closes():
  hand = diloco.ByHand(CONFIG)
  hand.do_all(hand.join(0) + hand.join(1))
  for t in range(1, STEPS):
    hand.do_all(hand.step(0, at_s=t) + hand.step(1, at_s=t + 0.01))
  by_hand = _merged(e for moment in hand.history for e in moment.effects)

  seen = _Merges()
  timing = diloco.Timing(step_s={0: 1.0, 1: 1.01})
  cluster = diloco.Cluster(CONFIG, timing, seed=0, observer=seen)
  cluster.start(0)
  cluster.start(1)
  cluster.run(until=STEPS)
  assert by_hand == seen.found[: len(by_hand)]
  assert len(by_hand) == 4
  versions = hand.syncer.snapshot().versions
  assert versions == (2, 2)
  held = hand.learners[0].snapshot().fragments
  assert tuple(f.host for f in held) == versions


def test_who_died_takes_the_state_of_the_other():
  hand = diloco.ByHand(CONFIG)
  hand.do_all(hand.join(0) + hand.join(1))
  for t in (1, 2):
    hand.do_all(hand.step(0, at_s=t) + hand.step(1, at_s=t))
  hand.do_all(hand.lose(1, at_s=2.5))
  assert 1 not in hand.learners
  hand.do_all(hand.join(1) + hand.step(0, at_s=3))
  said = [
    m.event.message.source
    for m in hand.history
    if isinstance(getattr(m.event, 'message', None), messages.Ready)
  ]
  assert said[2:] == ['learner 0 at its step 3']


def test_a_played_learner_is_heard_as_a_machine_is():
  hand = diloco.ByHand(CONFIG)
  for m in (0, 1):
    hand.hello(m)
    hand.says(m, messages.Ready(steps_away=0, source='its seed'))
  for t in (1, 2):
    hand.report(0, at_s=t)
    hand.report(1, at_s=t)
  assert hand.offer(0, round_=1, steps=2, at_s=2.1) == []
  wanted = hand.offer(1, round_=1, steps=2, at_s=2.2)
  pulls = [w for w in wanted if isinstance(w.effect, syncer_events.Pull)]
  assert [w.who for w in pulls] == [SYNCER, SYNCER]
  assert [w.effect.learner for w in pulls] == [0, 1]
  merges = [
    w for w in hand.do(wanted) if isinstance(w.effect, syncer_events.Merge)
  ]
  (merge,) = merges
  assert [share.weight for share in merge.effect.shares] == [0.5, 0.5]


def test_time_does_not_run_back_and_machines_have_to_be_there():
  hand = diloco.ByHand(CONFIG)
  hand.wait(3.0)
  with pytest.raises(ValueError, match=r'the clock is at 3\.0 s already'):
    hand.hello(0, at_s=2.0)
  with pytest.raises(ValueError, match='who=5: has no machine'):
    hand.step(5)
