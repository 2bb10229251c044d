# SPDX-License-Identifier: Apache-2.0
"""Converts what a simulated fleet did to the lanes of a timeline."""

from collections.abc import Iterable, Sequence

from diloco.fleets.fleet import FleetResult
from diloco.pages import parts
from diloco.pages.parts import Timeline, TimelineSpan

ROUNDS_MAX = 4  # Lanes of rounds; more of them overlap.


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
  lanes = lanes_of([(due, merged) for _, due, _, merged in tally.round_spans])
  for lane, round_span in zip(lanes, tally.round_spans):
    number, due_s, quorum_s, merged_s = round_span
    place, label = len(learners) + lane, f'round {number}'
    spans.append(TimelineSpan(place, due_s, quorum_s, 'round', label))
    spans.append(TimelineSpan(place, quorum_s, merged_s, 'grace', label))
  return Timeline(
    name,
    title,
    (*learners, *['rounds'] * (max(lanes, default=0) + 1)),
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


def lanes_of(spans: Sequence[tuple[float, float]]) -> list[int]:
  """Returns for each span the first free lane, of at most ROUNDS_MAX."""
  free_s, lanes = [0.0] * ROUNDS_MAX, []
  for begin_s, end_s in spans:
    lane = next(
      (i for i, at_s in enumerate(free_s) if at_s <= begin_s), ROUNDS_MAX - 1
    )
    free_s[lane] = end_s
    lanes.append(lane)
  return lanes
