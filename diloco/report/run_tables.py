# SPDX-License-Identifier: Apache-2.0
"""Tables of runs: ends, learners, deaths, faults, rounds, bytes, counts."""

import collections
import dataclasses
import re
import statistics
from collections.abc import Iterator, Sequence

from diloco.metrics import figures
from diloco.metrics.figures import Figure
from diloco.metrics.recorded_faults import RecordedFault
from diloco.metrics.recorded_run import RecordedRound, RecordedRun
from diloco.metrics.workdir import learner_name
from diloco.pages.parts import Cell, Column, Table
from diloco.report import run_report

RUN_FIGURES = tuple(figures.shown(figures.RUN, figures.PAGE))
LEARNER_FIGURES = tuple(figures.shown(figures.LEARNER, figures.PAGE))


def overview(runs: Sequence[RecordedRun]) -> Table:
  """A row per run."""
  columns = (
    run_column(runs),
    Column('state'),
    *(Column(each.label) for each in RUN_FIGURES),
    Column('deaths'),
  )
  return Table(
    'runs',
    'The runs' if len(runs) > 1 else 'The run',
    columns,
    tuple(
      (
        run.label,
        run_report.state(run),
        *_cells(RUN_FIGURES, run.status),
        len(run.deaths()),
      )
      for run in runs
    ),
    notes=tuple(f'{each.label}: {each.meaning}' for each in RUN_FIGURES),
  )


def _cells(table: Sequence[Figure], status) -> list[Cell]:
  """Returns the text of each figure; None where it is not known."""
  if status is None:
    return [None] * len(table)
  values = [(each, each.value(status)) for each in table]
  return [None if x is None else each.text(x) for each, x in values]


def learners(runs: Sequence[RecordedRun]) -> Table:
  """A row per run and learner."""
  columns = (
    run_column(runs),
    Column('learner'),
    *(Column(each.label) for each in LEARNER_FIGURES),
    Column('starts'),
    Column('deaths'),
    Column('weight', 3),
    Column('versions behind', 2),
    Column('most behind'),
    Column('offer waited s', 2),
  )
  return Table(
    'learners',
    'Each learner',
    columns,
    tuple(_learner(run, m) for run in runs for m in run.learners),
    notes=(
      *(f'{each.label}: {each.meaning}' for each in LEARNER_FIGURES),
      'Weight, versions behind (staleness) and how long its offer waited until '
      'the window ended: means over the rounds that merged it.',
    ),
  )


def _learner(run: RecordedRun, learner: int) -> tuple[Cell, ...]:
  shares = [
    share
    for each in run.rounds
    for share in each.shares
    if share.learner == learner
  ]
  told = run.status.learners if run.status else ()
  name = learner_name(learner)
  lives = run.lives.get(name, ())
  return (
    run.label,
    learner,
    *_cells(
      LEARNER_FIGURES, next((x for x in told if x.learner == learner), None)
    ),
    len(lives) or None,
    sum(life.process == name for life in run.deaths()) if lives else None,
    mean([share.weight for share in shares]),
    mean([share.behind for share in shares]),
    max((share.behind for share in shares), default=None),
    mean([share.age_s for share in shares]),
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


def faults(
  hits: Sequence[RecordedFault], name: str, title: str
) -> Iterator[Table]:
  """A row per fault; no table where there was none."""
  if hits:
    yield Table(
      name,
      title,
      (
        Column('fault'),
        Column('kind'),
        Column('target'),
        Column('at s', 1),
        Column('back after s', 1),
        Column('lost, learner·s', 1),
        Column("others' longest stall s", 2),
        Column('counted by the relay'),
        Column('why not'),
      ),
      tuple(map(dataclasses.astuple, hits)),
      notes=(
        'Back: merged again, or a round closed again. Lost: time of its target '
        'without a step meanwhile. Longest stall: between two steps of any '
        'learner that no fault explains, less its usual step. Counted: bytes '
        'that were held, delayed or throttled, or chunks that stalled.',
      ),
    )


def run_column(runs: Sequence[RecordedRun]) -> Column:
  """Returns the column 'run', which is hidden if there is only one."""
  return Column('run', hidden=len(runs) == 1)


def mean(values: Sequence[float]) -> float | None:
  """Returns the mean; None if there are no values."""
  return statistics.fmean(values) if values else None


def rounds(runs: Sequence[RecordedRun]) -> Table:
  """A row per run: how long its rounds took."""
  columns = (
    run_column(runs),
    Column('rounds'),
    Column('merged each', 2),
    Column('to quorum s', 3),
    Column('grace s', 3),
    Column('95 % of grace below s', 3),
    Column('sync s', 3),
    Column('stale %', 1),
    Column('why most windows ended'),
  )
  return Table(
    'rounds',
    'Rounds',
    columns,
    tuple(_rounds(run) for run in runs),
    notes=(
      'From due to quorum, from there to the end of the grace window, from the '
      'first pull to the end of the merge: means. Stale: merged contributions '
      'whose base was not the newest version.',
    ),
  )


def _rounds(run: RecordedRun) -> tuple[Cell, ...]:
  graces = sorted(e.grace_s for e in run.rounds if e.grace_s is not None)
  behind = [share.behind for each in run.rounds for share in each.shares]
  return (
    run.label,
    len(run.rounds),
    mean([len(each.shares) for each in run.rounds]),
    mean([e.quorum_s for e in run.rounds if e.quorum_s is not None]),
    mean(graces),
    graces[int(0.95 * (len(graces) - 1))] if graces else None,
    mean([each.sync_s for each in run.rounds]),
    100 * sum(b > 0 for b in behind) / len(behind) if behind else None,
    _commonest(run.rounds),
  )


def _commonest(rounds: Sequence[RecordedRound]) -> Cell:
  """Returns the commonest reason and its share of the rounds.

  Reasons that differ in numbers only are counted as one.
  """
  if not rounds:
    return None
  found = collections.Counter(
    re.sub(r'\d[\d.]*', '…', each.reason) for each in rounds
  )
  (reason, many), *_ = found.most_common(1)
  return f'{reason} ({many / len(rounds):.0%})'


def counts(runs: Sequence[RecordedRun]) -> Table:
  """Returns how many lines of each kind the syncer's event log has."""
  heads = {run.label: 'value' if len(runs) == 1 else run.label for run in runs}
  return Table(
    'counts',
    "What the syncer's event log has",
    (Column('event'), *(Column(heads[run.label]) for run in runs)),
    tuple(
      (kind, *(run.records.get(kind, 0) for run in runs))
      for kind in dict.fromkeys(kind for run in runs for kind in run.records)
    ),
    notes=('Lines of that kind, besides those that every round has.',),
  )
