# SPDX-License-Identifier: Apache-2.0
"""Converts what a simulated fleet did to the lanes of a timeline."""

from collections.abc import Iterable, Sequence

from diloco.fleets.fleet import FleetResult
from diloco.pages import parts
from diloco.pages.parts import Timeline, TimelineSpan


def timeline(
  name: str,
  title: str,
  outcome: FleetResult,
  learners: Sequence[str],
  until_s: float,
  more: Iterable[TimelineSpan] = (),
  notes: tuple[str, ...] = (),
) -> Timeline:
  """A lane per learner, and below them as many as rounds overlap.

  Args:
    outcome: of the run; what its tally kept is drawn.
    learners: names of the lanes, by learner id.
    until_s: what is later is left out.
    more: what befell the learners, such as pauses.
  """
  tally = outcome.tally
  spans = [
    *more,
    *(
      TimelineSpan(m, begin, end, 'bootstrap')
      for m, begin, end in tally.bootstraps
    ),
    *(
      TimelineSpan(m, begin, end, 'step') for m, begin, end in tally.steps_spans
    ),
  ]
  # A simulated window ends with the merge.
  rounds = [
    (f'round {number}', *times, times[-1])
    for number, *times in tally.round_spans
  ]
  round_lanes, of_rounds = parts.rounds_of(rounds, len(learners))
  spans += of_rounds
  return Timeline(
    name,
    title,
    (
      *learners,
      'rounds',
      *(f'rounds, lane {i}' for i in range(2, round_lanes + 1)),
    ),
    tuple(
      sorted(
        parts.within(spans, until_s), key=lambda s: (s.lane, s.begin_s, s.end_s)
      )
    ),
    tuple(
      (at_s, m, f'merged {number}')
      for at_s, m, number in tally.merged_marks
      if at_s <= until_s
    ),
    (*notes, 'A mark below a lane: a round took the learner in.'),
  )
