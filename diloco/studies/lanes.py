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
  # A simulated window ends with the merge.
  rounds = [(*times, times[-1]) for times in tally.round_spans]
  round_lanes, of_rounds = rounds_of(rounds, len(learners))
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


def rounds_of(
  rounds: Iterable[tuple[int, float, float, float, float]], first: int
) -> tuple[int, list[TimelineSpan]]:
  """Returns the number of lanes of the rounds, and their spans.

  Each round takes the first free lane, of at most ROUNDS_MAX.

  Args:
    rounds: number, then seconds: due, quorum, end of the window, update.
    first: the first of their lanes.
  """
  free_s, spans = [], []
  for number, due_s, quorum_s, window_s, update_s in rounds:
    free = (i for i, at_s in enumerate(free_s) if at_s <= due_s)
    lane = next(free, min(len(free_s), ROUNDS_MAX - 1))
    free_s[lane : lane + 1] = [update_s]
    place, label = first + lane, f'round {number}'
    spans.append(TimelineSpan(place, due_s, quorum_s, 'round', label))
    spans.append(TimelineSpan(place, quorum_s, window_s, 'grace', label))
    spans.append(TimelineSpan(place, window_s, update_s, 'round', label))
  return len(free_s), spans
