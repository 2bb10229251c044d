# SPDX-License-Identifier: Apache-2.0
"""Charts of real runs: what changed as they went, a colour for each run."""

import itertools
from collections.abc import Callable, Iterator, Sequence

from diloco.pages.parts import Chart, Line
from diloco.reports import windows
from diloco.reports.recorded_run import Loss, RecordedRun, Round
from diloco.studies import run_lives

SINCE = 'seconds since the first learner was ready'
Values = Iterator[tuple[float, float, float]]  # (x, value, weight).


def losses(runs: Sequence[RecordedRun]) -> Iterator[Chart]:
  """Against tokens and against time; none where no loss is known."""
  for name, words, x_label, x_of in (
    ('loss-tokens', 'tokens', 'tokens trained by all learners', _tokens),
    ('loss-time', 'wall-clock time', SINCE, _time),
  ):
    lines = [line for i, run in enumerate(runs) for line in _loss(run, i, x_of)]
    if lines:
      yield Chart(
        name=name,
        title=f'Loss against {words}',
        x_label=x_label,
        y_label='loss, nats per token',
        lines=tuple(lines),
        moments=_deaths(runs) if x_of is _time else (),
        notes=(
          'Training: the mean over all learners, each with its own parameters, '
          'in windows of equal width. Validation: the global model on held-out '
          'text.',
        ),
      )


def _tokens(loss: Loss) -> float:
  return loss.tokens


def _time(loss: Loss) -> float:
  return loss.at_s


def _loss(
  run: RecordedRun, group: int, x_of: Callable[[Loss], float]
) -> Iterator[Line]:
  last = max(map(x_of, run.training), default=0.0)
  values = ((x_of(each), each.loss, each.steps) for each in run.training)
  if trained := windows.means(values, last):
    yield Line(run.label, 'training', *zip(*trained), group=group)
  if run.validation:
    points = [(x_of(each), each.loss) for each in run.validation]
    yield Line(run.label, 'validation', *zip(*points), group=group)


def goodput(runs: Sequence[RecordedRun]) -> Iterator[Chart]:
  """In windows of time, with the deaths."""
  lines = []
  for i, run in enumerate(runs):
    if not run.steps or run.until_s <= 0:
      continue
    many = windows.WINDOWS
    edges = [run.until_s * n / many for n in range(many + 1)]
    shares = run_lives.windows(run.steps, len(run.learners), edges)
    middles = tuple((a + b) / 2 for a, b in itertools.pairwise(edges))
    lines.append(Line(run.label, 'course', middles, tuple(shares), group=i))
  if lines:
    yield Chart(
      name='goodput',
      title='Goodput over time',
      x_label=SINCE,
      y_label="% of all learners' time",
      y_range=(0.0, 105.0),
      lines=tuple(lines),
      moments=_deaths(runs),
      notes=(
        'Share of the time of all learners, dead or alive, that went into '
        f'inner steps, in {windows.WINDOWS} windows of equal width.',
      ),
    )


def rounds(runs: Sequence[RecordedRun]) -> Iterator[Chart]:
  """Who took part, how stale it was, how long rounds waited for it."""
  yield from _of_rounds(
    runs,
    'participation',
    'Participation over time',
    '% of the learners merged',
    _participation,
    (0.0, 105.0),
    ('Of the M learners of the configuration, dead or alive.',),
  )
  yield from _of_rounds(
    runs,
    'staleness',
    'Staleness over time',
    'versions behind',
    _staleness,
    None,
    (
      'How many versions of the fragment were published between the base of a '
      'merged contribution and the round: 0 is the newest possible.',
    ),
  )
  yield from _of_rounds(
    runs,
    'grace',
    'Grace windows over time',
    'seconds',
    _grace,
    None,
    ('From quorum to the end of the window, mean of the rounds.',),
  )


def _participation(run: RecordedRun, each: Round) -> Values:
  yield each.at_s, 100.0 * len(each.shares) / len(run.learners), 1.0


def _staleness(run: RecordedRun, each: Round) -> Values:
  del run
  yield from ((each.at_s, float(s.behind), 1.0) for s in each.shares)


def _grace(run: RecordedRun, each: Round) -> Values:
  del run
  if each.grace_s is not None:
    yield each.at_s, each.grace_s, 1.0


def _of_rounds(
  runs: Sequence[RecordedRun],
  name: str,
  title: str,
  y_label: str,
  values_of: Callable[[RecordedRun, Round], Values],
  y_range: tuple[float, float] | None,
  notes: tuple[str, ...],
) -> Iterator[Chart]:
  lines = []
  for i, run in enumerate(runs):
    values = (v for each in run.rounds for v in values_of(run, each))
    if points := windows.means(values, run.until_s):
      lines.append(Line(run.label, 'course', *zip(*points), group=i))
  if lines:
    yield Chart(
      name=name,
      title=title,
      x_label=SINCE,
      y_label=y_label,
      y_range=y_range,
      lines=tuple(lines),
      moments=_deaths(runs),
      notes=notes,
    )


def _deaths(
  runs: Sequence[RecordedRun],
) -> tuple[tuple[float, int, str], ...]:
  """Of all runs; told apart where there are several."""
  several = len(runs) > 1
  return tuple(
    (life.ended_s, i, f'{run.label}: a death' if several else 'a death')
    for i, run in enumerate(runs)
    for life in run.deaths()
  )
