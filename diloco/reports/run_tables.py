# SPDX-License-Identifier: Apache-2.0
"""Tables of real runs: how they ended, their learners, their deaths."""

import statistics
from collections.abc import Iterator, Sequence

from diloco.metrics import ages, goodput
from diloco.metrics.workdir import learner_name
from diloco.pages.parts import Cell, Column, Table
from diloco.reports import run_state
from diloco.reports.recorded_run import RecordedRun


def overview(runs: Sequence[RecordedRun]) -> Table:
  """A row per run."""
  columns = (
    run_column(runs),
    Column('state'),
    Column('training loss', 4),
    Column('validation loss', 4),
    Column('M tokens', 3),
    Column('seconds', 0),
    Column('step'),
    Column('of'),
    Column('learners'),
    Column('goodput %', 1),
    Column('uptime %', 1),
    Column('deaths'),
  )
  return Table(
    'runs',
    'The runs' if len(runs) > 1 else 'The run',
    columns,
    tuple(_overview(run) for run in runs),
    notes=(
      'Steps are those of the global clock, tokens those trained by all '
      'learners. Training loss: mean of the last tenth of the tokens. Goodput: '
      'learner time in steps, but for stalls and for steps that a death took, '
      "over that of all learners, dead or alive; from the syncer's tape, since "
      'the first learner was ready, to the end, or of a run that did not '
      'finish to the last line. Uptime is of the steps that are known, to the '
      'last step or round.',
    ),
  )


def _overview(run: RecordedRun) -> tuple[Cell, ...]:
  tokens = len(run.steps) * run.setup.tokens_per_step
  worked = None if run.goodput is None else 100 * run.goodput
  uptime = None
  if run.steps and run.until_s > 0:
    uptime = 100 * goodput.uptime(run.steps, 0.0, run.until_s)
  late = [
    (each.loss, each.steps)
    for each in run.training
    if each.tokens >= 0.9 * run.training[-1].tokens
  ]
  trained = (
    sum(loss * many for loss, many in late) / sum(many for _, many in late)
    if late
    else None
  )
  return (
    run.label,
    run_state.state(run),
    trained,
    run.validation[-1].loss if run.validation else None,
    tokens / 1e6,
    run.until_s,
    max((each.step for each in run.rounds), default=0),
    run.setup.total_steps,
    len(run.learners),
    worked,
    uptime,
    len(run.deaths()),
  )


def learners(runs: Sequence[RecordedRun]) -> Table:
  """A row per run and learner."""
  columns = (
    run_column(runs),
    Column('learner'),
    Column('inner steps'),
    Column('M tokens', 3),
    Column('step s', 3),
    Column('stall %', 1),
    Column('starts'),
    Column('deaths'),
    Column('participation %', 1),
    Column('weight', 3),
    Column('versions behind', 2),
    Column('most behind'),
    Column('offer waited s', 2),
    Column('in steps', 2),
    Column('older than 1.5 %', 1),
  )
  return Table(
    'learners',
    'Each learner',
    columns,
    tuple(_learner(run, m) for run in runs for m in run.learners),
    notes=(
      'Participation: share of the closed rounds that merged it. Weight, '
      'versions behind (staleness) and how long its offer waited until the '
      'window ended, also in its own steps: means over those rounds, and the '
      'share of those that were older than 1.5 steps.',
    ),
  )


def _learner(run: RecordedRun, learner: int) -> tuple[Cell, ...]:
  own = [step for step in run.steps if step.learner == learner]
  shares = [
    share
    for each in run.rounds
    for share in each.shares
    if share.learner == learner
  ]
  merged = ages.Ages()
  for share in shares:
    if share.age_steps is not None:
      merged.add(share.age_steps)
  all_s = sum(step.step_s for step in own)
  lives = run.lives.get(learner_name(learner), ())
  name = learner_name(learner)
  return (
    run.label,
    learner,
    len(own),
    len(own) * run.setup.tokens_per_step / 1e6,
    mean([step.step_s for step in own]),
    100 * sum(step.stall_s for step in own) / all_s if all_s else None,
    len(lives) or None,
    sum(life.process == name for life in run.deaths()) if lives else None,
    100 * len(shares) / len(run.rounds) if run.rounds else None,
    mean([share.weight for share in shares]),
    mean([share.behind for share in shares]),
    max((share.behind for share in shares), default=None),
    mean([share.age_s for share in shares]),
    merged.mean_steps,
    None if merged.old_share is None else 100 * merged.old_share,
  )


def deaths(runs: Sequence[RecordedRun]) -> Iterator[Table]:
  """A row per death; no table where there was none."""
  rows = []
  for run in runs:
    for life in run.deaths():
      back_s = next(
        (
          other.started_s
          for other in run.lives[life.process]
          if other.started_s >= life.ended_s
        ),
        None,
      )
      away_s = back_s - life.ended_s if back_s is not None else None
      rows.append(
        (
          len(rows) + 1,
          run.label,
          life.process,
          life.ended_s,
          life.death,
          away_s,
        )
      )
  if rows:
    yield Table(
      'deaths',
      'Deaths',
      (
        Column('death'),
        run_column(runs),
        Column('process'),
        Column('at s', 1),
        Column('how'),
        Column('started again after s', 2),
      ),
      tuple(rows),
    )


def run_column(runs: Sequence[RecordedRun]) -> Column:
  """Returns the column 'run', which is hidden if there is only one."""
  return Column('run', hidden=len(runs) == 1)


def mean(values: Sequence[float]) -> float | None:
  """Returns the mean; None if there are no values."""
  return statistics.fmean(values) if values else None
