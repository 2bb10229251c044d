# SPDX-License-Identifier: Apache-2.0
"""Tables of runs: ends, learners, deaths, faults, rounds, bytes, counts."""

import collections
import dataclasses
import re
import statistics
from collections.abc import Iterator, Sequence

from diloco.metrics import ages, status
from diloco.metrics import goodput as metrics_goodput
from diloco.metrics.recorded_faults import RecordedFault
from diloco.metrics.recorded_run import RecordedRound, RecordedRun
from diloco.metrics.workdir import learner_name
from diloco.pages.parts import Cell, Column, Table
from diloco.report import run_report

# Of a RunSummary.
COUNTED = ('step', 'rounds', 'wall_s', 'goodput', 'uptime', 'refused')


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
    uptime = 100 * metrics_goodput.uptime(run.steps, 0.0, run.until_s)
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
    run_report.state(run),
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
  merged = ages.ContributionAges()
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


def traffic(runs: Sequence[RecordedRun]) -> Table:
  """Payload bytes, as the syncer counted them."""
  columns = (
    run_column(runs),
    Column('parameters'),
    Column('pulls up'),
    Column('pulls down'),
    Column('MB up', 2),
    Column('MB down', 2),
    Column('bytes per round, up', 0),
    Column('bytes per round, down', 0),
    Column('per parameter, up', 3),
    Column('per parameter, down', 3),
  )
  return Table(
    'bytes',
    'Bytes',
    columns,
    tuple(_traffic(run) for run in runs),
    notes=(
      'Payloads that were pulled. Per parameter: of one leg, for one round of '
      'each of the P fragments; f32 needs 4, bf16 needs 2. Unknown where '
      'nothing was evaluated or the run did not finish.',
    ),
  )


def _traffic(run: RecordedRun) -> tuple[Cell, ...]:
  counted, evaluated = run.summary, run.evaluation
  parameters = evaluated.parameters if evaluated else None
  source = counted or run.status
  if source is None:
    return (run.label, parameters, *[None] * 8)
  many = counted.rounds if counted else run.status.closed_round
  per_parameter = (None, None)
  if counted and parameters:
    per_parameter = tuple(
      status.bytes_per_parameter(bytes_, pulls, counted.fragments, parameters)
      for bytes_, pulls in (
        (counted.bytes_up, counted.pulls_up),
        (counted.bytes_down, counted.pulls_down),
      )
    )
  return (
    run.label,
    parameters,
    counted.pulls_up if counted else None,
    counted.pulls_down if counted else None,
    source.bytes_up / 1e6,
    source.bytes_down / 1e6,
    source.bytes_up / many if many else None,
    source.bytes_down / many if many else None,
    *per_parameter,
  )


def counts(runs: Sequence[RecordedRun]) -> Table:
  """Returns the syncer's counts, from summary.json or the last status.json."""
  names = {run.label: 'value' if len(runs) == 1 else run.label for run in runs}
  counted = [_counted(run) for run in runs]
  rows = [
    (name.replace('_s', ', s'), *(of.get(name) for _, of in counted))
    for name in COUNTED
  ]
  for kind in dict.fromkeys(kind for run in runs for kind in run.records):
    rows.append(
      (f'events: {kind}', *(run.records.get(kind, 0) for run in runs))
    )
  return Table(
    'counts',
    'What the syncer counted',
    (Column('of'), *(Column(names[run.label], 3) for run in runs)),
    tuple(rows),
    notes=(
      *(
        f'{run.label}: from {file}.'
        for run, (file, _) in zip(runs, counted)
        if file
      ),
      'A syncer that was started again counts uptime anew; the first table '
      'has that of the whole run.',
      'Events: lines of that kind in its event log, besides those of rounds.',
    ),
  )


def _counted(run: RecordedRun) -> tuple[str | None, dict[str, Cell]]:
  """The file, and COUNTED as it says."""
  if run.summary:
    return 'summary.json', {n: getattr(run.summary, n) for n in COUNTED}
  if told := run.status:
    counted = (
      told.step, told.closed_round, None, told.goodput, told.uptime,
      told.refused,
    )  # fmt: skip
    return 'status.json', dict(zip(COUNTED, counted))
  return None, {}
