# SPDX-License-Identifier: Apache-2.0
"""Charts of real runs: what changed as they went, a colour for each run."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from diloco.metrics.recorded_run import (
  SYNCER,
  Loss,
  RecordedRound,
  RecordedRun,
)
from diloco.metrics.workdir import learner_name
from diloco.pages.parts import Chart, Line
from diloco.prediction import run_lives

WINDOWS_MAX = 60  # Of a chart's width.
WINDOWS_MIN = 4

Point = tuple[float, float]
SINCE = 'seconds since the first learner was ready'
LATE_FROM = 0.25  # Of a run's tokens.
LEARNERS_MAX = 6  # Lines of a chart of one run.
Values = Iterator[tuple[float, float, float]]  # (x, value, weight).


# Many values as few: means in windows of equal width.


def fitting(values: int, each: int) -> int:
  """Returns a number of windows with about `each` values in each."""
  return min(WINDOWS_MAX, max(WINDOWS_MIN, values // each))


def means(
  values: Iterable[tuple[float, float, float]],
  until: float,
  windows: int,
) -> list[Point]:
  """Returns (x, weighted mean) of each non-empty window of [0, until].

  Args:
    values: (x, value, weight); those that are not finite are left out.

  Returns:
    x is the weighted mean of the window's.
  """
  if until <= 0:
    return []
  sums = [[0.0, 0.0, 0.0] for _ in range(windows)]
  for x, value, weight in values:
    if not math.isfinite(value) or weight <= 0:
      continue
    window = sums[min(windows - 1, max(0, int(windows * x / until)))]
    window[0] += weight
    window[1] += weight * x
    window[2] += weight * value
  return [(x / many, y / many) for many, x, y in sums if many]


def losses(runs: Sequence[RecordedRun]) -> Iterator[Chart]:
  """Against tokens and against time; none where no loss is known."""
  note = (
    'Training: the mean over all learners, each with its own parameters, in '
    'windows of equal width. Validation: the global model on held-out text.'
  )
  by_tokens = [
    line for i, run in enumerate(runs) for line in _loss(run, i, _tokens)
  ]
  by_time = [
    line for i, run in enumerate(runs) for line in _loss(run, i, _time)
  ]
  if not by_tokens:
    return
  yield Chart(
    name='loss-tokens',
    title='Loss against tokens',
    x_label='tokens trained by all learners',
    y_label='loss, nats per token',
    lines=tuple(by_tokens),
    notes=(note,),
  )
  yield Chart(
    name='loss-late',
    title='Loss against tokens, without the beginning',
    x_label='tokens trained by all learners',
    y_label='loss, nats per token',
    lines=tuple(map(_late, by_tokens)),
    notes=(f'Each run without the first {LATE_FROM:.0%} of its tokens.',),
  )
  yield Chart(
    name='loss-time',
    title='Loss against wall-clock time',
    x_label=SINCE,
    y_label='loss, nats per token',
    lines=tuple(by_time),
    moments=_deaths(runs),
    notes=(note,),
  )


def _late(line: Line) -> Line:
  """Returns the later part of a line, whose start would flatten the rest."""
  late = [
    (x, y) for x, y in zip(line.xs, line.ys) if x >= LATE_FROM * line.xs[-1]
  ]
  xs, ys = zip(*late)
  return dataclasses.replace(line, xs=xs, ys=ys)


def _tokens(loss: Loss) -> float:
  return loss.tokens


def _time(loss: Loss) -> float:
  return loss.at_s


def _loss(
  run: RecordedRun, group: int, x_of: Callable[[Loss], float]
) -> Iterator[Line]:
  last = max(map(x_of, run.training), default=0.0)
  values = ((x_of(each), each.loss, each.steps) for each in run.training)
  many = fitting(len(run.training), 2 * len(run.learners))
  if trained := means(values, last, many):
    yield Line(run.label, 'training', *zip(*trained), group=group)
  if run.validation:
    points = [(x_of(each), each.loss) for each in run.validation]
    yield Line(run.label, 'validation', *zip(*points), group=group)


def goodput(runs: Sequence[RecordedRun]) -> Iterator[Chart]:
  """Yields goodput in windows of time, with the deaths."""
  lines = []
  for i, run in enumerate(runs):
    if not run.steps or run.until_s <= 0:
      continue
    many = fitting(len(run.steps), 5 * len(run.learners))
    learners = len(run.learners)
    points = run_lives.windows(run.steps, learners, run.until_s, many)
    lines.append(Line(run.label, 'course', *points, group=i))
  if lines:
    yield Chart(
      name='goodput',
      title='Learner time in steps',
      x_label=SINCE,
      y_label="% of all learners' time",
      y_range=(0.0, 105.0),
      lines=tuple(lines),
      moments=_deaths(runs),
      notes=(
        'Share of the time of all learners, dead or alive, that went into '
        'inner steps, in windows of equal width; also into those that a death '
        'took, which the goodput in the first table does not count.',
      ),
    )


def rounds(runs: Sequence[RecordedRun]) -> Iterator[Chart]:
  """Yields participation, staleness and waiting times of rounds.

  A single run is shown in more detail than several, which have a line each.
  """
  alone = len(runs) == 1
  by_learner = alone and len(runs[0].learners) <= LEARNERS_MAX
  yield from _chart(
    runs,
    'participation',
    'Participation over time',
    '% of the rounds that merged it' if by_learner else '% of M merged',
    _by_learner(runs[0]) if by_learner else _lines(runs, _participation),
    (0.0, 105.0),
    'Of the closed rounds in windows of equal width; M counts learners dead or '
    'alive.',
  )
  behind = list(_lines(runs, _staleness))
  yield from _chart(
    runs,
    'staleness',
    'Staleness over time',
    'versions behind',
    behind,
    (0.0, max([1.0, *(1.1 * y for line in behind for y in line.ys)])),
    'How many versions of the fragment were published between the base of a '
    'merged contribution and its round, mean: 0 is the newest possible.',
  )
  yield from _chart(
    runs,
    'grace',
    'What rounds wait for' if alone else 'Grace windows over time',
    'seconds',
    _waits(runs[0]) if alone else _lines(runs, _grace),
    None,
    'Quorum: from due to quorum. Grace window: from there to its end. Sync: '
    'from the first pull to the end of the merge. Means of the rounds.'
    if alone
    else 'From quorum to the end of the window, mean of the rounds.',
  )


def _participation(run: RecordedRun, each: RecordedRound) -> Values:
  yield each.at_s, 100.0 * len(each.shares) / len(run.learners), 1.0


def _staleness(run: RecordedRun, each: RecordedRound) -> Values:
  del run
  yield from ((each.at_s, float(s.behind), 1.0) for s in each.shares)


def _grace(run: RecordedRun, each: RecordedRound) -> Values:
  del run
  if each.grace_s is not None:
    yield each.at_s, each.grace_s, 1.0


def _by_learner(run: RecordedRun) -> Iterator[Line]:
  for learner in run.learners:
    values = (
      (each.at_s, 100.0 * any(s.learner == learner for s in each.shares), 1.0)
      for each in run.rounds
    )
    many = fitting(len(run.rounds), 8)  # These are shares of rounds.
    if points := means(values, run.until_s, many):
      yield Line(f'learner {learner}', 'course', *zip(*points), group=learner)


def _waits(run: RecordedRun) -> Iterator[Line]:
  for i, (label, wait_of) in enumerate(
    (
      ('quorum', lambda each: each.quorum_s),
      ('grace window', lambda each: each.grace_s),
      ('sync', lambda each: each.sync_s),
    )
  ):
    waits = ((each.at_s, wait_of(each)) for each in run.rounds)
    values = (
      (at_s, wait_s, 1.0) for at_s, wait_s in waits if wait_s is not None
    )
    many = fitting(len(run.rounds), 4)
    if points := means(values, run.until_s, many):
      yield Line(label, 'course', *zip(*points), group=i)


def _lines(
  runs: Sequence[RecordedRun],
  values_of: Callable[[RecordedRun, RecordedRound], Values],
) -> Iterator[Line]:
  """Yields one line per run, with means in windows."""
  for i, run in enumerate(runs):
    values = (v for each in run.rounds for v in values_of(run, each))
    many = fitting(len(run.rounds), 4)
    if points := means(values, run.until_s, many):
      yield Line(run.label, 'course', *zip(*points), group=i)


def _chart(
  runs: Sequence[RecordedRun],
  name: str,
  title: str,
  y_label: str,
  lines: Iterable[Line],
  y_range: tuple[float, float] | None,
  note: str,
) -> Iterator[Chart]:
  """Over time, with the deaths; none where there is no line."""
  if lines := tuple(lines):
    yield Chart(
      name=name,
      title=title,
      x_label=SINCE,
      y_label=y_label,
      y_range=y_range,
      lines=lines,
      moments=_deaths(runs),
      notes=(note,),
    )


def _deaths(
  runs: Sequence[RecordedRun],
) -> tuple[tuple[float, int, str], ...]:
  """Returns the deaths of all runs; for one run, coloured by process."""
  if len(runs) > 1:
    return tuple(
      (life.ended_s, i, f'{run.label}: a death')
      for i, run in enumerate(runs)
      for life in run.deaths()
    )
  names = [*map(learner_name, runs[0].learners), SYNCER]
  return tuple(
    (life.ended_s, names.index(life.process), f'{life.process} dies')
    for life in runs[0].deaths()
    if life.process in names
  )
