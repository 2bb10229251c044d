# SPDX-License-Identifier: Apache-2.0
"""A real run as lanes: its learners, and its rounds below them."""

import itertools
from collections.abc import Iterator

from diloco.metrics.workdir import learner_name
from diloco.pages.parts import Span, Timeline
from diloco.reports.recorded_run import RecordedRun
from diloco.studies import lanes
from diloco.studies.run_history import SYNCER


def of(run: RecordedRun, name: str, title: str) -> Timeline | None:
  """The whole run; None where nothing was done in it."""
  if not run.steps and not run.rounds:
    return None
  processes = [*map(learner_name, run.learners), SYNCER]
  spans = [
    Span(step.learner, max(0.0, step.end_s - step.step_s), step.end_s, 'step')
    for step in run.steps
  ]
  for lane, process in enumerate(processes):
    spans += _absences(run, lane, process)
  round_lanes, of_rounds = _rounds(run, len(run.learners))
  return Timeline(
    name=name,
    title=title,
    lanes=(*processes, *['rounds beside'] * (round_lanes - 1)),
    spans=tuple(
      sorted((*spans, *of_rounds), key=lambda s: (s.lane, s.begin_s, s.end_s))
    ),
    marks=tuple(
      (each.at_s, share.learner, f'merged {each.number}')
      for each in run.rounds
      for share in each.shares
      if share.learner in run.learners
    ),
    notes=(
      "A mark below a learner's lane: a round took it in. The syncer's lanes: "
      'rounds from due to their update, with their grace windows; those that '
      'are open at the same time lie below each other.',
    ),
  )


def _absences(run: RecordedRun, lane: int, process: str) -> Iterator[Span]:
  """Deaths until the next start, starts until the first use, pauses."""
  lives = run.lives.get(process, ())
  for life in lives:
    used_s = life.spoke_s if process == SYNCER else life.stepped_s
    first_s = life.ended_s if used_s is None else used_s
    yield from _within(run, lane, life.started_s, first_s, 'bootstrap')
  for dead, back in itertools.pairwise(lives):
    yield from _within(run, lane, dead.ended_s, back.started_s, 'dead')
  if lives and lives[-1].death:
    yield from _within(run, lane, lives[-1].ended_s, run.until_s, 'dead')
  for paused, begin_s, end_s in run.pauses:
    if paused == process:
      yield from _within(run, lane, begin_s, end_s, 'pause')


def _within(
  run: RecordedRun, lane: int, begin_s: float, end_s: float, kind: str
) -> Iterator[Span]:
  begin_s, end_s = max(begin_s, 0.0), min(end_s, run.until_s)
  if end_s > begin_s:
    yield Span(lane, begin_s, end_s, kind)


def _rounds(run: RecordedRun, first: int) -> tuple[int, list[Span]]:
  """Returns the number of lanes of the rounds, and their spans."""
  known = [each for each in run.rounds if each.grace_s is not None]
  spans, times_s = [], []
  for each in known:
    window_s = max(0.0, each.at_s - each.sync_s)  # Its end.
    quorum_s = max(0.0, window_s - each.grace_s)
    times_s.append((max(0.0, quorum_s - each.quorum_s), quorum_s, window_s))
  places = lanes.lanes_of(
    [(due_s, each.at_s) for each, (due_s, *_) in zip(known, times_s)]
  )
  for each, place, (due_s, quorum_s, end_s) in zip(known, places, times_s):
    lane, label = first + place, f'round {each.number}'
    spans.append(Span(lane, due_s, quorum_s, 'round', label))
    spans.append(Span(lane, quorum_s, end_s, 'grace', label))
    spans.append(Span(lane, end_s, each.at_s, 'round', label))
  return max(places, default=-1) + 1, spans
