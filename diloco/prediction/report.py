# SPDX-License-Identifier: Apache-2.0
"""A real run and its prediction from the same kills, side by side."""

import pathlib
import statistics
from collections.abc import Callable, Iterable, Sequence

from diloco.metrics import figures
from diloco.metrics import goodput as metrics_goodput
from diloco.metrics.goodput import StepRecord
from diloco.metrics.recorded_run import RecordedRun
from diloco.metrics.run_progress import counted
from diloco.metrics.workdir import Workdir, learner_name
from diloco.pages.parts import Cell, Column, ReportPage, Table
from diloco.prediction import recorded
from diloco.prediction.recorded import Speeds
from diloco.prediction.twin import START_SPREAD, Twin, simulate

SIDE_BY_SIDE = (
  Column('measured', digits=1),
  Column('predicted', digits=1, spread='spread'),
  Column('spread', digits=1, hidden=True),
  Column('difference', digits=1),
)


def report(
  folder: pathlib.Path, seeds: int, say: Callable[[str], None]
) -> ReportPage:
  """Returns the page of one run.

  Args:
    seeds: number of predictions, each with other step lengths and start-ups.

  Raises:
    NotPredictable: the folder holds no run that can be predicted.
  """
  run = recorded.read(folder)
  config = recorded.config_of(Workdir(run.folder))
  speeds = recorded.measure(run, config.run.restart_delay_s)
  kills = recorded.kills(run)
  twins = [
    simulate(
      config, speeds, recorded.arrivals(run), kills, (0.0, run.until_s), seed
    )
    for seed in counted(range(seeds), say, lambda seed: f'seed {seed}')
  ]
  return ReportPage(
    name=f'replay-{config.name}',
    title=f'{config.name}: {len(kills)} kills, measured and predicted',
    command=f'python -m diloco.simulate --replay={folder}',
    paragraphs=(
      'The prediction is told: the configuration; when each learner made its '
      'first step; when each process was killed; when the run ended; and, as '
      'measured in this run, the length of steps, their spread and the share '
      f'of them that is stall ({speeds.where}), the time of a sync, and '
      'start-ups. A kill costs run.restart_delay_s and a start-up.',
      'All else follows from the machines of diloco/protocol under a simulated '
      'clock: who waited for a syncer, which rounds closed, who was merged. ± '
      'is the standard deviation over seeds: of step lengths and of start-ups, '
      'each of which is any of the measured ones, or varies by '
      f'{START_SPREAD:.0%} where only one was measured.',
    ),
    parts=(_agreement(run, twins), _inputs(speeds, config.run.restart_delay_s)),
  )


def _agreement(run: RecordedRun, twins: Sequence[Twin]) -> Table:
  rounds, steps = len(run.rounds), len(run.steps)
  rows = [
    ('goodput, %', *_percent(run.goodput, [x.goodput for x in twins])),
    ('uptime, %', *_percent(run.uptime, [x.uptime for x in twins])),
    ('rounds closed', *_beside(rounds, [x.rounds for x in twins])),
    ('inner steps of all', *_beside(steps, [len(x.steps) for x in twins])),
  ]
  for m in run.learners:
    name = learner_name(m)
    measured, *stepping = (
      _stepping(m, steps, run.until_s)
      for steps in (run.steps, *(twin.steps for twin in twins))
    )
    merged = sum(m == x.learner for each in run.rounds for x in each.shares)
    participation = figures.participation(merged, len(run.rounds))
    predicted = [twin.participation(m) for twin in twins]
    rows += [
      (f'{name}: stepping, %', *_percent(measured, stepping)),
      (f'{name}: in rounds, %', *_percent(participation, predicted)),
    ]
  return Table(
    name='agreement',
    title=f'{run.until_s:.0f} s of {len(run.learners)} learners',
    columns=(Column('quantity'), *SIDE_BY_SIDE),
    rows=tuple(rows),
  )


def _inputs(speeds: Speeds, restart_delay_s: float) -> Table:
  def starts(took_s: Sequence[float]) -> tuple[float, str]:
    return _mean(took_s), f'mean of {len(took_s)}'

  return Table(
    name='inputs',
    title='What the prediction was given, besides the kills',
    columns=(Column('quantity'), Column('value', digits=2), Column('measured')),
    rows=(
      ('length of a step, ms', 1e3 * _mean(speeds.step_s), speeds.where),
      ('its standard deviation, %', 100 * speeds.jitter, speeds.where),
      ('stall, % of a step', 100 * speeds.stall_share, speeds.where),
      ('sync of a round, ms', 1e3 * speeds.sync_s, speeds.where),
      ('start-up of a learner, s', *starts(speeds.learner_starts_s)),
      ('start-up of the syncer, s', *starts(speeds.syncer_starts_s)),
      ('run.restart_delay_s', restart_delay_s, 'configuration'),
    ),
  )


def _stepping(m: int, steps: Iterable[StepRecord], until_s: float) -> float:
  """Returns the share of the run that a learner spent in steps."""
  own = [step for step in steps if step.learner == m]
  return metrics_goodput.stepping(own, 1, 0.0, until_s)


def _percent(
  measured: float | None, predicted: Sequence[float | None]
) -> tuple[Cell, ...]:
  shares = [measured, *predicted]
  of_all = [None if each is None else 100 * each for each in shares]
  return _beside(of_all[0], of_all[1:])


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
