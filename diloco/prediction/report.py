# SPDX-License-Identifier: Apache-2.0
"""A real run and its prediction from the same kills, side by side."""

import bisect
import pathlib
import statistics
from collections.abc import Callable, Container, Iterable, Sequence

from diloco.metrics import recorded_run
from diloco.metrics.goodput import StepRecord
from diloco.metrics.run_progress import counted
from diloco.metrics.workdir import learner_name
from diloco.pages.parts import Cell, Column, ReportPage, Table
from diloco.prediction import history as prediction_history
from diloco.prediction import run_lives
from diloco.prediction.history import History, NotPredictable
from diloco.prediction.prediction import (
  START_SPREAD,
  Calibration,
  Prediction,
  PredictionInputs,
  calibrate,
  plan_of,
  predict,
)
from diloco.simulator.network import SYNCER

SIDE_BY_SIDE = (
  Column('measured', digits=1),
  Column('predicted', digits=1, spread='spread'),
  Column('spread', digits=1, hidden=True),
  Column('difference', digits=1),
)


def report(
  folder: pathlib.Path,
  seeds: int,
  say: Callable[[str], None],
  calibration: pathlib.Path | None = None,
) -> ReportPage:
  """Returns the page of one run.

  Args:
    seeds: number of predictions, each with other step lengths and start-ups.
    calibration: folder of another run of the same configuration, whose speeds
      are taken, so that of this one only the kills are known; None: this run
      itself, as far as `calibrate` may use it.

  Raises:
    NotPredictable: a folder holds no run that can be replayed, or the two runs
      differ in the number of learners.
  """
  history = prediction_history.read(folder)
  plan = plan_of(history)
  speeds = _speeds(history, calibration)
  inputs_s: set[float] = set()  # When the starts that were measured began.
  if calibration is None:
    inputs_s.update(speeds.learner_start_s.started_s)
    inputs_s.update(speeds.syncer_start_s.started_s)
  all_starts = calibrate(history)
  predictions, knowing = [], []
  for seed in counted(range(seeds), say, lambda seed: f'seed {seed}'):
    predictions.append(predict(plan, speeds, seed))
    # What is left of the difference where all start-ups are known.
    knowing.append(predict(plan, all_starts, seed))
  other = '' if calibration is None else f' --calibration={calibration}'
  return ReportPage(
    name=f'replay-{history.config.name}',
    title=f'{history.config.name}: {len(plan.kills)} kills, measured and '
    'predicted',
    command=f'python -m diloco.simulate --replay={folder}{other}',
    paragraphs=_paragraphs(speeds, calibration),
    parts=(
      _whole(history, predictions, knowing),
      _learners(history, predictions),
      _deaths(history, plan, predictions, inputs_s),
      _inputs(history, speeds),
      run_lives.timeline(history, predictions[0]),
      run_lives.chart(history, predictions),
    ),
  )


def _speeds(history: History, other: pathlib.Path | None) -> Calibration:
  if other is None:
    return calibrate(history, returns_max=1)
  calibrating = prediction_history.read(other)
  here, there = len(history.learners), len(calibrating.learners)
  if here != there:
    raise NotPredictable(
      f'{other}: {there} learners, the run to be predicted has {here}'
    )
  return calibrate(calibrating)


def _paragraphs(
  speeds: Calibration, other: pathlib.Path | None
) -> tuple[str, ...]:
  whose = 'this run' if other is None else f'the run in {other}'
  return (
    'The prediction is told: the configuration; when each learner made its '
    'first step; when each process was killed; when the run ended. A kill '
    f'costs run.restart_delay_s and a start-up. Measured in {whose}, and '
    'given to it: the length of steps, their spread and the share of them that '
    f'is stall ({speeds.where}), the time of a sync, and start-ups '
    f'({speeds.learner_start_s.where}; {speeds.syncer_start_s.where}).',
    'All else follows from the machines of diloco/protocol under a simulated '
    'clock: how long everybody was away, who waited for a syncer, which rounds '
    'closed, who was merged. No down time of a predicted death is known, but '
    'for those that start-ups are measured on. ± is the standard deviation '
    'over seeds: of step lengths and of start-ups, which vary by '
    f'{START_SPREAD:.0%} where only one was measured.',
    'Kills come at the times at which they came. A plan that waits until '
    'everybody is back, as that of tests.chaos.soak, would have waited here '
    'too: where start-ups are predicted too long, such a kill falls into '
    'one, and costs another.',
  )


# Tables -----------------------------------------------------------------------


def _whole(
  history: History,
  predictions: Sequence[Prediction],
  knowing: Sequence[Prediction],
) -> Table:
  steps = [len(p.steps) for p in predictions]
  rounds = [p.outcome.rounds for p in predictions]
  rows = [
    ('goodput, %', *_points(history.goodput, [p.goodput for p in predictions])),
    (
      'goodput, %, start-ups known',
      *_points(history.goodput, [p.goodput for p in knowing]),
    ),
    ('uptime, %', *_points(history.uptime, [p.uptime for p in predictions])),
    ('rounds closed', *_beside(len(history.closes), rounds)),
    ('inner steps of all', *_beside(len(history.steps), steps)),
  ]
  return Table(
    name='agreement',
    title=f'{history.until_s:.0f} s of {len(history.learners)} learners',
    columns=(Column('quantity'), *SIDE_BY_SIDE),
    rows=tuple(rows),
    notes=(
      'Start-ups known: each is drawn from those of all undisturbed returns in '
      'this run. What differs then is due to the model; the rest of the first '
      "row's difference, to start-ups that took longer or shorter than those "
      'that it was given.',
    ),
  )


def _learners(history: History, predictions: Sequence[Prediction]) -> Table:
  rows = []
  for learner in history.learners:
    merged = [p.outcome.participation(learner) for p in predictions]
    stepping = [_share(learner, p.steps, history) for p in predictions]
    measured = _share(learner, history.steps, history)
    name = learner_name(learner)
    rows += [
      (name, 'stepping, %', *_points(measured, stepping)),
      (
        name,
        'merged in, % of rounds',
        *_points(history.participation(learner), merged),
      ),
    ]
  return Table(
    name='learners',
    title='Each learner',
    columns=(Column('learner'), Column('quantity'), *SIDE_BY_SIDE),
    rows=tuple(rows),
  )


def _deaths(
  history: History,
  plan: PredictionInputs,
  predictions: Sequence[Prediction],
  inputs_s: Container[float],
) -> Table:
  """Returns the time from each kill until its process was of use again."""
  rows = []
  for process, at_s in plan.kills:
    measured = _until_next(run_lives.uses(history, process), at_s)
    predicted = [
      _until_next(run_lives.predicted_uses(p, process), at_s)
      for p in predictions
    ]
    name = recorded_run.SYNCER if process == SYNCER else learner_name(process)
    starts_s = [life.started_s for life in history.lives[name]]
    is_input = next((s for s in starts_s if s > at_s), None) in inputs_s
    rows.append(
      (
        name,
        at_s,
        *_beside(measured, predicted),
        'its start-up' if is_input else None,
      )
    )
  return Table(
    name='deaths',
    title='Seconds from each kill to the next step, of a learner, or to the '
    'next round, of the syncer',
    columns=(
      Column('process'),
      Column('at_s'),
      *SIDE_BY_SIDE,
      Column('was given'),
    ),
    rows=tuple(rows),
    notes=('A dash: it did not come back before the end.',),
  )


def _inputs(history: History, speeds: Calibration) -> Table:
  first_s = [
    life.stepped_s - life.started_s
    for life in (history.lives[learner_name(m)][0] for m in history.learners)
    if life.stepped_s is not None
  ]
  learner, syncer = speeds.learner_start_s, speeds.syncer_start_s
  delay_s = history.config.run.restart_delay_s
  rows = [
    ('length of a step, ms', 1e3 * _mean(speeds.step_s), speeds.where),
    ('its standard deviation, %', 100 * speeds.jitter, speeds.where),
    ('stall, % of a step', 100 * speeds.stall_share, speeds.where),
    ('sync of a round, ms', 1e3 * speeds.sync_s, speeds.where),
    ('start-up of a learner, s', learner.mean, learner.where),
    ('start-up of the syncer, s', syncer.mean, syncer.where),
    ('run.restart_delay_s', delay_s, 'configuration'),
  ]
  if first_s:
    where = 'not used: it compiles, and all start at once'
    rows.append(('first start-ups here, s', _mean(first_s), where))
  return Table(
    name='inputs',
    title='What the prediction was given, besides the kills',
    columns=(Column('quantity'), Column('value', digits=2), Column('measured')),
    rows=tuple(rows),
  )


def _share(
  learner: int, steps: Iterable[StepRecord], history: History
) -> float:
  """Returns the share of the run that a learner spent in steps."""
  made_s = sum(s.step_s - s.stall_s for s in steps if s.learner == learner)
  return made_s / history.until_s


def _until_next(times_s: Sequence[float], at_s: float) -> float | None:
  """Returns the time to the first later one of some ascending times."""
  place = bisect.bisect_right(times_s, at_s)
  return times_s[place] - at_s if place < len(times_s) else None


def _points(
  measured: float | None, predicted: Sequence[float]
) -> tuple[Cell, ...]:
  """Shares as percent."""
  percent = None if measured is None else 100 * measured
  return _beside(percent, [100 * each for each in predicted])


def _beside(
  measured: float | None, predicted: Sequence[float | None]
) -> tuple[Cell, ...]:
  """Cells of SIDE_BY_SIDE; None where some did not happen."""
  if None in predicted:
    return measured, None, None, None
  mean, spread = _mean(predicted), statistics.pstdev(predicted)
  difference = None if measured is None else mean - measured
  return measured, mean, spread, difference


def _mean(values: Sequence[float]) -> float:
  return statistics.fmean(values)
