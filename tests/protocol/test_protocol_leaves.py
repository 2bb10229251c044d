# SPDX-License-Identifier: Apache-2.0
"""The leaf decisions of the protocol, each on its own."""

import dataclasses
import math

import pytest

from diloco.protocol import messages
from diloco.protocol.learner.bootstrap import Start
from diloco.protocol.learner.machine import Learner
from diloco.protocol.learner.offers import (
  max_ahead,
  min_ahead,
  next_ahead,
  next_offer,
  refreshed_round,
)
from diloco.protocol.learner.state import View
from diloco.protocol.pace import PaceClock
from diloco.protocol.round_policy import (
  QUORUM_RULES,
  RoundPolicy,
  Verdict,
  equal_weight,
  grace_window_s,
  normalised,
  token_weight,
)
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer import sessions
from diloco.protocol.syncer.collecting import kth_s
from tests.protocol.stages import FINGERPRINTS, RUN, SyncerStage, config_of


def _pace(clocks, quorum, spacing_steps=10, ahead_max=10):
  pace = PaceClock(spacing_steps, ahead_max)
  for learner in clocks:
    pace.join(learner, 0, quorum)
  for learner, steps in clocks.items():
    pace.advance(learner, steps, quorum)
  return pace


def test_a_close_leaves_nobody_more_than_one_spacing_behind():
  pace = _pace({0: 9, 1: 5}, quorum=1, spacing_steps=2)
  pace.close()
  assert pace.clocks == {0: 9, 1: 7}


def test_a_learner_joins_at_the_global_step():
  pace = _pace({0: 9}, quorum=1)
  pace.join(1, 0, quorum=1)
  assert pace[1] == 9


def test_a_clock_is_at_most_the_rounds_in_flight_beyond_t():
  pace = _pace({0: 40, 1: 3}, quorum=2, spacing_steps=4, ahead_max=8)
  assert (pace.step, pace.clocks) == (3, {0: 8, 1: 3})
  pace.advance(0, 1, quorum=2)
  assert pace[0] == 9  # t had been 0 when it was counted last.


def test_t_leaps_by_no_more_than_a_spacing_when_the_slowest_leaves():
  pace = _pace({0: 12, 1: 0}, quorum=2, spacing_steps=4, ahead_max=12)
  pace.leave(1, quorum=2)
  assert pace.step == 4
  pace.advance(0, 1, quorum=2)  # Nor with the next report.
  assert pace.step == 5


def test_a_clock_from_before_counts_on_joining_as_far_as_any_may():
  pace = PaceClock(4, 8, step=100)
  pace.join(0, 500, quorum=1)
  assert (pace.step, pace.clocks) == (104, {0: 104})


@pytest.mark.parametrize(
  'quorum_s,sync_s,expected',
  [
    (0.5, 0.5, 0.5),  # 0.5 x (2 x 1 - 1)
    (0.0, 0.0, 0.9),  # 1.0 is over the cap
    (2.0, 1.0, 0.0),  # no slack is left
  ],
)
def test_grace_window(quorum_s, sync_s, expected):
  window_s = grace_window_s(1.0, quorum_s, sync_s, 2, 0.5, cap_steps=0.9)
  assert window_s == pytest.approx(expected)


@pytest.mark.parametrize(
  'k,expected_s', [(1, 0.1), (2, 0.4), (3, 0.9), (8, 0.9)]
)
def test_the_way_back_that_counts_is_the_kth_of_those_known(k, expected_s):
  assert kth_s([0.9, None, 0.1, 0.4], k) == expected_s
  assert kth_s([None], k) is None


@pytest.mark.parametrize('seconds', [-0.1, math.nan, math.inf])
def test_a_time_that_is_none_is_not_believed(seconds):
  good = messages.Fetched(1, 0, 1, fetch_s=0.5, held_s=0.5)
  assert sessions.is_possible(good)
  for name in ('fetch_s', 'held_s'):
    bad = dataclasses.replace(good, **{name: seconds})
    assert not sessions.is_possible(bad)


def test_equal_weight_counts_who_trained_once():
  assert equal_weight(c_tokens=600, c_steps=3) == 1.0
  assert equal_weight(0, 0) == 0.0


def test_token_weight_is_quantity_times_quality():
  assert token_weight(c_tokens=600, c_steps=3) == 600 * 200


def test_with_interpolation_a_process_counts_from_its_checkpoint():
  """Earlier steps can't be told from what the rule has left of θ."""
  start = Start('a checkpoint', (0,), (3,), (4,), (400,), step=6, tokens=600)
  for blend, counted in (('interpolate', (6, 600)), ('rebase', (4, 400))):
    config = config_of({'fragments': 1, 'blend': blend})
    [fragment] = Learner(config, 'run', 0, {}, start).snapshot().fragments
    assert (fragment.from_step, fragment.from_tokens) == counted


def test_all_zero_weights_become_equal():
  assert normalised({0: 0.0, 1: 0.0}) == {0: 0.5, 1: 0.5}


STANDING = {'t': 10.0, 'closed_known': 4, 'last_offered': 4, 'ahead_steps': 0}


CONFIG = config_of(
  {'fragments': 4, 'sync_every_steps': 8, 'overlap_steps': 5}
)  # s = 2, at most 3 rounds in flight.


@pytest.mark.parametrize(
  'fields,round_',
  [
    ({}, 5),  # Due at step 10.
    ({'t': 9.2}, 5),  # Rather early: it will be refreshed.
    ({'t': 9.0}, None),
    ({'t': 9.2, 'refreshes': True}, None),  # An earlier round's comes first.
    ({'t': 9.5, 'refreshes': True}, 5),
    ({'t': 8.2, 'ahead_steps': 1}, 5),
    ({'t': 8.0, 'ahead_steps': 1}, None),
    ({'t': 9.0, 'ahead_steps': 4}, 5),  # One at a boundary, the oldest first.
    ({'last_offered': 5}, None),
    ({'t': 12.0, 'last_offered': 5}, 6),
    ({'t': 99.0, 'last_offered': 7}, None),  # 3 rounds in flight.
    ({'t': 99.0, 'last_offered': 7, 'ahead_steps': 2}, 8),
    ({'t': 99.0, 'closed_known': 8}, 9),
  ],
)
def test_next_offer(fields, round_):
  assert next_offer(CONFIG, **{**STANDING, **fields}) == round_


def test_a_round_may_be_on_offer_for_the_step_under_way():
  """τ = 1, s = 1: before the update of a round is here, the next two are due.

  Its offer's copy is made a step after the decision.
  """
  each_step = config_of(
    {'fragments': 4, 'sync_every_steps': 4, 'overlap_steps': 1}
  )
  standing = {**STANDING, 't': 6.0, 'last_offered': 5}
  assert next_offer(each_step, **standing) == 6


@pytest.mark.parametrize(
  'ahead_steps,waited_steps,expected',
  [
    (0, None, 1),  # Not merged.
    (4, None, 4),  # τ − 1.
    (2, 2.3, 1),  # s = 2: it may be refreshed once.
    (2, 2.1, 2),
    (0, 9.0, 0),
  ],
)
def test_next_ahead(ahead_steps, waited_steps, expected):
  assert next_ahead(ahead_steps, waited_steps, CONFIG) == expected


@pytest.mark.parametrize(
  'options,expected',
  [
    ({'overlap_steps': 0}, 0),
    ({'overlap_steps': 1, 'fragments': 1}, 1),
    ({'overlap_steps': 1, 'fragments': 2}, 1),  # s = 4.
    ({'overlap_steps': 3, 'fragments': 2}, 0),  # The round before may be open.
    ({'overlap_steps': 1, 'fragments': 8}, 0),  # s = 1: no refresh.
  ],
)
def test_the_shortest_lead_is_where_a_learner_begins(options, expected):
  config = config_of({'fragments': 4, 'sync_every_steps': 8, **options})
  assert min_ahead(config) == expected
  assert next_ahead(expected, 9.0, config) == expected
  assert min_ahead(config) <= max_ahead(config)


@pytest.mark.parametrize(
  'rounds,closes_late_steps,expected',
  [
    ((4, 5), 0, 5),  # t is at 10: round 4 was due at 8, and closed.
    ((4, 5), 2, 4),  # Rounds close two steps after they are due.
    ((5, 6), 0, 5),
    ((3, 4), 0, 3),  # What is open though it is late waits for its quorum.
    ((), 0, None),
  ],
)
def test_the_round_that_gets_a_newer_copy(rounds, closes_late_steps, expected):
  view = View(step=10, own_step=10)
  for _ in range(50):
    view = view.closed(closes_late_steps)
  assert refreshed_round(rounds, view, 10, CONFIG) == expected


def test_the_view_of_a_fast_learner_does_not_run_away():
  view = View().moved(10, 20).moved(20, 40)
  assert view.at(60) == 30


@pytest.mark.parametrize(
  'broken,words',
  [
    ({'fragments': 3}, 'fragments=3 does not divide sync_every_steps=4'),
    ({'quorum': 4}, 'quorum=4, must be between 1 and learners=3'),
    ({'quorum': 0}, 'quorum=0'),
    ({'overlap_steps': 4}, 'overlap_steps=4'),
    ({'grace_safety': 1.0}, 'grace_safety=1.0, must be in [0, 1)'),
    ({'admission': 'newest'}, "admission='newest', must be one of"),
    ({'blend': 'average'}, "blend='average', must be one of"),
    ({'quorum_rule': 'most'}, "quorum_rule='most', must be one of"),
    ({'blend_alpha': 0.5}, 'blend_alpha=0.5, must be 0'),
    ({'patience': float('nan')}, 'patience=nan'),
    ({'total_steps': 0}, 'total_steps=0'),
  ],
)
def test_impossible_configs_name_the_rule(broken, words):
  with pytest.raises(ValueError) as raised:
    config_of(broken)
  assert words in str(raised.value)


def test_versions_follow_from_the_closed_round():
  config = config_of({'fragments': 2})
  closed = range(6)
  counted = [[0, 0]]
  for round_ in closed[1:]:
    versions = list(counted[-1])
    versions[config.fragment_of(round_)] += 1
    counted.append(versions)
  assert [list(config.versions_at(r)) for r in closed] == counted


def test_a_round_follows_the_rule_of_quorum_of_its_config(monkeypatch):
  def everyone(standing):
    return Verdict(standing.offers == standing.live, 'not all of them')

  monkeypatch.setitem(QUORUM_RULES, 'everyone', everyone)
  policy = RoundPolicy(config_of({'quorum_rule': 'everyone'}))
  assert policy.enough(1, 2, quorum=1) == (False, 'not all of them')
  assert policy.enough(2, 2, quorum=1).holds
  counted = RoundPolicy(config_of({}))
  assert counted.enough(1, 2, quorum=1) == (True, '1/1 offers, 2 live')


@pytest.mark.parametrize(
  'changes,refused',
  [({}, False), ({'run': 'other'}, True), ({'fingerprints': {}}, True)],
)
def test_an_inquiry_is_answered_and_changes_nothing(changes, refused):
  stage = SyncerStage()
  stage.say('join', {'learner': 0})
  before = stage.machine.snapshot()
  inquiry = messages.Inquiry(
    **{
      'protocol': messages.PROTOCOL_VERSION,
      'run': RUN,
      'learner': 0,
      'incarnation': 9,
      'fingerprints': FINGERPRINTS,
      **changes,
    }
  )
  heard = syncer_events.Heard(0, 9, inquiry)
  effects = stage.machine.handle(heard, before.now)
  assert stage.machine.snapshot() == before
  assert isinstance(effects[-1], syncer_events.EndSession)
  said = [x.message for x in effects if isinstance(x, syncer_events.Send)]
  assert [each.final for each in said] == [True] * refused


def test_a_crc_that_was_told_outlives_the_shard():
  """After a lost ledger only the learner's hello says what version 1 is."""
  stage = SyncerStage(
    fragments=2, learners=1, quorum=1, sync_every_steps=2, overlap_steps=1
  )
  stage.say('come', {'learner': 0, 'versions': (1, 1), 'began': True})
  told = stage.machine.lost_crcs
  assert set(told) == {0, 1}
  stage.say('absent', {'fragments': (1,)})
  assert stage.machine.lost_crcs == told
  # The leader itself knows no more than what the shard has.
  stage.machine.handle(
    syncer_events.ShardReturned((syncer_events.Held(1, version=0, crc=1),)),
    now=1.0,
  )
  assert stage.machine.lost_crcs == told


@pytest.mark.parametrize(
  'spacing,clock,offered,awaits',
  [
    (2, 2, 1, False),
    (2, 1, 1, True),  # It may refresh its offer before its step is due.
    (2, 2, None, True),
    (2, 2, 0, True),  # Its offer is for an older round of the fragment.
    (1, 1, 1, False),  # Its next offer is of another fragment.
  ],
)
def test_a_window_ends_early_once_it_is_open_for_nobody(
  spacing, clock, offered, awaits
):
  policy = RoundPolicy(
    config_of({'fragments': 4, 'sync_every_steps': 4 * spacing})
  )
  assert policy.awaits(1, 2, clock, offered) == awaits
  over = policy.why_over(0.0, 9.0, awaits, '1/1 offers')
  assert over == (None if awaits else 'everyone is in')
  assert policy.why_over(9.0, 9.0, True, '1/1 offers').startswith('window')
