# SPDX-License-Identifier: Apache-2.0
"""Lanes of a timeline, from what a simulation kept."""

import types

from diloco.fleets.tally import Tally
from diloco.pages import parts
from diloco.pages.parts import TimelineSpan
from diloco.studies import lanes


def timeline(tally, until_s=10.0, more=()):
  outcome = types.SimpleNamespace(tally=tally)
  return lanes.timeline('t', 't', outcome, ['a', 'b'], until_s, more)


def test_rounds_that_overlap_have_lanes_of_their_own():
  tally = Tally()
  tally.round_spans = [
    (1, 0.0, 1.0, 3.0),
    (2, 2.0, 2.5, 4.0),
    (3, 3.0, 3.5, 5.0),
  ]
  drawn = timeline(tally)
  assert drawn.lanes == ('a', 'b', 'rounds', 'rounds, lane 2')
  assert [(s.label, s.kind, s.lane) for s in drawn.spans] == [
    ('round 1', 'round', 2),
    ('round 1', 'grace', 2),
    ('round 3', 'round', 2),
    ('round 3', 'grace', 2),
    ('round 2', 'round', 3),
    ('round 2', 'grace', 3),
  ]


def test_any_number_of_overlapping_rounds_has_few_lanes():
  tally = Tally()
  tally.round_spans = [(r, 0.0, 1.0, 9.0) for r in range(1, 20)]
  assert len(timeline(tally).lanes) == 2 + parts.ROUND_LANES_MAX


def test_what_is_later_is_left_out_and_what_reaches_there_is_cut():
  tally = Tally()
  tally.steps_spans = [(0, 0.0, 6.0), (0, 6.0, 12.0), (1, 12.0, 18.0)]
  tally.merged_marks = [(9.0, 0, 1), (11.0, 0, 2)]
  drawn = timeline(tally, more=[TimelineSpan(1, 3.0, 99.0, 'pause')])
  assert drawn.spans == (
    TimelineSpan(0, 0.0, 6.0, 'step'),
    TimelineSpan(0, 6.0, 10.0, 'step'),
    TimelineSpan(1, 3.0, 10.0, 'pause'),
  )
  assert drawn.marks == ((9.0, 0, 'merged 1'),)
