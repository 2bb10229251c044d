# SPDX-License-Identifier: Apache-2.0
"""The parts of a page of runs: state, tables, charts, timelines."""

import datetime
import math
from collections.abc import Iterator, Sequence

from diloco.metrics import recorded_run
from diloco.metrics.recorded_run import SYNCER, RecordedRun
from diloco.metrics.workdir import learner_name
from diloco.pages import parts as pages_parts
from diloco.pages.parts import Part, Timeline, TimelineSpan
from diloco.report import run_charts, run_tables
from diloco.studies import lanes

FINISHED = 'finished'
STOPPED = 'stopped'
GOING = 'no end'


def state(run: RecordedRun) -> str:
  """Returns the state in a word or two."""
  if run.ended or (run.status and run.status.finished):
    return FINISHED
  lasts = [lives[-1] for lives in run.lives.values() if lives]
  if lasts and all(life.ended_s < math.inf for life in lasts):
    return STOPPED
  return GOING


def sentence(run: RecordedRun) -> str | None:
  """Returns a sentence on a run that did not finish; None if it did."""
  how = state(run)
  if how == FINISHED:
    return None
  why = {
    STOPPED: 'all its processes ended before it was over',
    GOING: 'it is still going, or everything was killed at once',
  }[how]
  if not run.steps:
    return f'{run.label} did not finish: {why}. No inner step of it is known.'
  step = max((each.step for each in run.rounds), default=0)
  last = datetime.datetime.fromtimestamp(run.last_s, datetime.UTC)
  return (
    f'{run.label} did not finish: {why}. Shown is what it had written, up to '
    f'step {step} of {run.setup.total_steps}, '
    f'{pages_parts.duration(run.until_s)} '
    f'after its first learner was ready; its last line is of '
    f'{last:%Y-%m-%d %H:%M:%S} UTC.'
  )


def of(run: RecordedRun, name: str, title: str) -> Timeline | None:
  """The whole run; None where nothing was done in it."""
  if not run.steps and not run.rounds:
    return None
  processes = [*map(learner_name, run.learners), SYNCER]
  spans = [
    TimelineSpan(
      step.learner, max(0.0, step.end_s - step.step_s), step.end_s, 'step'
    )
    for step in run.steps
  ]
  for lane, process in enumerate(processes):
    spans += pages_parts.within(_absences(run, lane, process), run.until_s)
  rounds = [
    (each.number, *each.times_s, each.at_s)
    for each in run.rounds
    if each.grace_s is not None
  ]
  round_lanes, of_rounds = lanes.rounds_of(rounds, len(run.learners))
  return Timeline(
    name=name,
    title=title,
    lanes=(
      *processes,
      *(f'{SYNCER}, lane {i}' for i in range(2, round_lanes + 1)),
    ),
    spans=tuple(
      sorted((*spans, *of_rounds), key=lambda s: (s.lane, s.begin_s, s.end_s))
    ),
    marks=tuple(
      (each.at_s, share.learner, f'merged {each.number}')
      for each in run.rounds
      for share in each.shares
      if share.learner in run.learners
    )
    + tuple(_hits(run, processes)),
    notes=(
      "A mark below a learner's lane: a round took it in. The syncer's lanes: "
      'rounds from due to their update, with their grace windows; those that '
      'are open at the same time lie below each other.',
    ),
  )


def _hits(
  run: RecordedRun, processes: Sequence[str]
) -> Iterator[tuple[float, int, str]]:
  """Yields a mark for each fault, on the lane of its target."""
  for fault in run.faults:
    target = fault.target.partition('.')[0]
    if fault.at_s is not None and target in processes:
      yield fault.at_s, processes.index(target), f'fault {fault.number}'


def _absences(
  run: RecordedRun, lane: int, process: str
) -> Iterator[TimelineSpan]:
  """Deaths until the next start, starts until the first use, pauses."""
  for begin_s, end_s, kind in recorded_run.absences(run.lives.get(process, ())):
    yield TimelineSpan(lane, begin_s, end_s, kind)
  for paused, begin_s, end_s in run.pauses:
    if paused == process:
      yield TimelineSpan(lane, begin_s, end_s, 'pause')


def paragraphs(runs: Sequence[RecordedRun]) -> Iterator[str]:
  """Yields a description of each run, with a missing end and gaps."""
  for run in runs:
    yield _what(run)
    if said := sentence(run):
      yield said
    gaps = [f'There is no {", no ".join(run.absent)}.'] if run.absent else []
    if gaps := [*gaps, *run.gaps]:
      yield f'{run.label} has gaps: {" ".join(gaps)}'


def _what(run: RecordedRun) -> str:
  setup = run.setup
  counted = run.evaluation
  size = f'{counted.parameters:,} parameters, ' if counted else ''
  return (
    f'{run.label} is a run of {setup.name!r}: {size}{setup.learners} learners, '
    f'{setup.fragments} fragments.'
  )


def parts(runs: Sequence[RecordedRun]) -> Iterator[Part]:
  """Yields the parts of the page, results first."""
  yield run_tables.overview(runs)
  yield from run_charts.losses(runs)
  yield from run_charts.goodput(runs)
  for i, run in enumerate(runs):
    name = f'timeline-{i}' if len(runs) > 1 else 'timeline'
    timeline = of(run, name, f'{run.label}: learners and rounds')
    if timeline is not None:
      yield timeline
  for i, run in enumerate(runs):
    yield from run_tables.faults(
      run.faults,
      f'faults-{i}' if len(runs) > 1 else 'faults',
      f'{run.label}: faults, and what the others did',
    )
  yield run_tables.learners(runs)
  yield run_tables.rounds(runs)
  yield from run_charts.rounds(runs)
  yield run_tables.counts(runs)
  yield from run_tables.deaths(runs)
