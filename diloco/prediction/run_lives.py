# SPDX-License-Identifier: Apache-2.0
"""Pictures of a run and its prediction: lives, and goodput as it went."""

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence

from diloco.metrics import goodput as metrics_goodput
from diloco.metrics import recorded_run
from diloco.metrics.goodput import StepRecord
from diloco.metrics.workdir import learner_name
from diloco.pages import parts
from diloco.pages.parts import Chart, Line, Timeline, TimelineSpan
from diloco.prediction.history import History
from diloco.prediction.prediction import Prediction
from diloco.simulator.network import SYNCER

WINDOWS = 40  # Of the chart.
GAP_STEPS = 4.0  # Steps closer than so many of their length are one span,
ROUND_GAP_S = 1.0  # and rounds that are closer than this.


def uses(history: History, process: int) -> list[float]:
  """Returns when a learner's steps begin, or the syncer's rounds close."""
  if process == SYNCER:
    return [close.at_s for close in history.closes]
  return _begins(history.steps, process)


def predicted_uses(prediction: Prediction, process: int) -> list[float]:
  """Returns the times of `uses` for a simulation."""
  if process == SYNCER:
    spans = prediction.outcome.tally.round_spans
    return [merged_s for *_, merged_s in spans]
  return _begins(prediction.steps, process)


def _begins(steps: Iterable[StepRecord], learner: int) -> list[float]:
  return sorted(s.end_s - s.step_s for s in steps if s.learner == learner)


def timeline(history: History, prediction: Prediction) -> Timeline:
  """The measured lives of each process over its predicted ones."""
  processes = [SYNCER, *history.learners]
  lanes, spans, marks = [], [], []
  for process in processes:
    name = recorded_run.SYNCER if process == SYNCER else learner_name(process)
    lanes += [f'{name}, measured', f'{name}, predicted']
    measured, predicted = len(lanes) - 2, len(lanes) - 1
    spans += _measured(history, process, measured)
    spans += _predicted(prediction, process, predicted)
    for killed, at_s in prediction.plan.kills:
      if killed == process:
        marks += [(at_s, lane, 'killed') for lane in (measured, predicted)]
  return Timeline(
    name='lives',
    title='Measured and predicted lives',
    lanes=tuple(lanes),
    spans=tuple(sorted(spans, key=lambda s: (s.lane, s.begin_s))),
    marks=tuple(marks),
    notes=('Predicted: the first seed.',),
  )


def _measured(
  history: History, process: int, lane: int
) -> Iterator[TimelineSpan]:
  name = recorded_run.SYNCER if process == SYNCER else learner_name(process)
  yield from work(history.steps, uses(history, process), process, lane)
  absences = recorded_run.absences(history.lives[name])
  spans = (TimelineSpan(lane, *absence) for absence in absences)
  yield from parts.within(spans, history.until_s)


def _predicted(
  prediction: Prediction, process: int, lane: int
) -> Iterator[TimelineSpan]:
  plan = prediction.plan
  times_s = predicted_uses(prediction, process)
  yield from work(prediction.steps, times_s, process, lane)
  spans = []
  for death in prediction.deaths:
    if death.process == process:
      started_s = death.at_s + plan.restart_delay_s
      up_s = next((t for t in times_s if t > death.at_s), plan.until_s)
      spans += [
        TimelineSpan(lane, death.at_s, started_s, 'dead'),
        TimelineSpan(lane, started_s, up_s, 'bootstrap'),
      ]
  yield from parts.within(spans, plan.until_s)


def work(
  steps: Sequence[StepRecord],
  uses_s: Sequence[float],
  process: int,
  lane: int,
) -> Iterator[TimelineSpan]:
  """Steps of a learner, rounds of the syncer; those close by as one."""
  if process == SYNCER:
    spans = [(at_s, at_s) for at_s in uses_s]
    gap_s = ROUND_GAP_S
  else:
    own = [s for s in steps if s.learner == process]
    spans = [(s.end_s - s.step_s, s.end_s) for s in own]
    gap_s = GAP_STEPS * statistics.fmean([s.step_s for s in own] or [0.0])
  kind = 'round' if process == SYNCER else 'step'
  close = metrics_goodput.joined(spans, gap_s)
  return (TimelineSpan(lane, *span, kind) for span in close)


def chart(history: History, predictions: Sequence[Prediction]) -> Chart:
  """Learner time in steps, in windows: where the two differ."""
  given = len(history.learners), history.until_s, WINDOWS
  middles, measured = windows(history.steps, *given)
  predicted = [windows(p.steps, *given)[1] for p in predictions]
  by_window = list(zip(*predicted, strict=True))
  return Chart(
    name='goodput',
    title='Learner time in steps, in windows of '
    f'{history.until_s / WINDOWS:.1f} s',
    x_label='seconds since the first learner was ready',
    y_label='in steps, %',
    y_range=(0.0, 105.0),
    lines=(
      Line('measured', 'measured', middles, tuple(measured)),
      Line(
        'predicted',
        'simulated',
        middles,
        tuple(map(statistics.fmean, by_window)),
        spreads=tuple(map(statistics.pstdev, by_window)),
        group=1,
      ),
    ),
  )


def windows(
  steps: Sequence[StepRecord], learners: int, until_s: float, many: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Learner time in steps, in windows of equal width of [0, until_s].

  Returns:
    The middle of each window, in seconds, and the percent of it that M
    learners spent in steps; a step may lie in two windows.
  """
  edges = [until_s * i / many for i in range(many + 1)]
  inside: list[list[StepRecord]] = [[] for _ in range(many)]
  for step in steps:
    first = max(0, int((step.end_s - step.step_s) / edges[1]))
    last = min(many - 1, int(step.end_s / edges[1]))
    for window in range(first, last + 1):
      inside[window].append(step)
  spans = list(itertools.pairwise(edges))
  return tuple((begin_s + end_s) / 2 for begin_s, end_s in spans), tuple(
    100.0 * metrics_goodput.stepping(each, learners, *span)
    for each, span in zip(inside, spans, strict=True)
  )
