# SPDX-License-Identifier: Apache-2.0
"""Pictures of a run and its prediction: lives, and goodput as it went."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from diloco.metrics import goodput
from diloco.metrics.goodput import StepRecord
from diloco.metrics.workdir import learner_name
from diloco.pages.parts import Chart, Line, Span, Timeline
from diloco.sim.wires import SYNCER
from diloco.studies import run_history
from diloco.studies.run_history import History, Life
from diloco.studies.run_prediction import Prediction

WINDOWS = 40  # Of the chart.
GAP_STEPS = 4.0  # Steps closer than so many of their length are one span.


def uses(history: History, process: int) -> list[float]:
  """When it was of use: a learner's steps begin, the syncer's rounds close."""
  if process == SYNCER:
    return [close.at_s for close in history.closes]
  return _begins(history.steps, process)


def predicted_uses(prediction: Prediction, process: int) -> list[float]:
  """The same of a simulation."""
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
    name = 'syncer' if process == SYNCER else f'learner {process}'
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
    spans=tuple(spans),
    marks=tuple(marks),
    notes=('Predicted: the first seed.',),
  )


def _measured(history: History, process: int, lane: int) -> Iterator[Span]:
  if process == SYNCER:
    lives = history.lives[run_history.SYNCER]
    ready = [life.spoke_s for life in lives]
    yield from _stretches(uses(history, SYNCER), lane, 'round', _step_s(history))
  else:
    lives = history.lives[learner_name(process)]
    ready = [life.stepped_s for life in lives]
    yield from _stepping(history.steps, process, lane)
  yield from _absences(lives, ready, lane, history.until_s)


def _absences(
  lives: Sequence[Life],
  ready: Sequence[float | None],
  lane: int,
  until_s: float,
) -> Iterator[Span]:
  for life, ready_s in zip(lives, ready, strict=True):
    up_s = min(life.ended_s if ready_s is None else ready_s, until_s)
    if up_s > max(life.started_s, 0.0):
      yield Span(lane, max(life.started_s, 0.0), up_s, 'bootstrap')
  for dead, back in itertools.pairwise(lives):
    end_s = min(back.started_s, until_s)
    if end_s > max(dead.ended_s, 0.0):
      yield Span(lane, max(dead.ended_s, 0.0), end_s, 'dead')


def _predicted(prediction: Prediction, process: int, lane: int) -> Iterator[Span]:
  plan = prediction.plan
  times_s = predicted_uses(prediction, process)
  if process == SYNCER:
    yield from _stretches(times_s, lane, 'round', _step_s(prediction))
  else:
    yield from _stepping(prediction.steps, process, lane)
  for death in prediction.deaths:
    if death.process != process:
      continue
    started_s = min(death.at_s + plan.restart_delay_s, plan.until_s)
    yield Span(lane, death.at_s, started_s, 'dead')
    up_s = next((t for t in times_s if t > death.at_s), plan.until_s)
    if up_s > started_s:
      yield Span(lane, started_s, up_s, 'bootstrap')


def _step_s(run: History | Prediction) -> float:
  return sum(s.step_s for s in run.steps) / len(run.steps)
