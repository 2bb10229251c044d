# SPDX-License-Identifier: Apache-2.0
"""Tables of real runs: how they ended, their learners, deaths and rounds."""

import collections
import re
import statistics
from collections.abc import Iterator, Sequence

from diloco.metrics import goodput, summary
from diloco.metrics.workdir import learner_name
from diloco.pages.parts import Cell, Column, Table
from diloco.reports import run_state
from diloco.reports.recorded_run import RecordedRun, Round


def overview(runs: Sequence[RecordedRun]) -> Table:
  """A row per run."""
  columns = (
    _run_column(runs),
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
      'learners. Training loss: mean of the last tenth of the tokens. Goodput '
      'and uptime are of the steps that are known, from the first learner that '
      'was ready to the last line that was written.',
    ),
  )


def _overview(run: RecordedRun) -> tuple[Cell, ...]:
  tokens = len(run.steps) * run.setup.tokens_per_step
  worked = uptime = None
  if run.steps and run.until_s > 0:
    worked = 100 * goodput.goodput(
      run.steps, len(run.learners), 0.0, run.until_s
    )
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
    _run_column(runs),
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
  )
  return Table(
    'learners',
    'Each learner',
    columns,
    tuple(_learner(run, m) for run in runs for m in run.learners),
    notes=(
      'Participation: share of the closed rounds that merged it. Weight, '
      'versions behind (staleness) and how long its offer waited until the '
      'window ended: means over those rounds.',
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
  all_s = sum(step.step_s for step in own)
  lives = run.lives.get(learner_name(learner), ())
  name = learner_name(learner)
  return (
    run.label,
    learner,
    len(own),
    len(own) * run.setup.tokens_per_step / 1e6,
    _mean([step.step_s for step in own]),
    100 * sum(step.stall_s for step in own) / all_s if all_s else None,
    len(lives) or None,
    sum(life.process == name for life in run.deaths()) if lives else None,
    100 * len(shares) / len(run.rounds) if run.rounds else None,
    _mean([share.weight for share in shares]),
    _mean([share.behind for share in shares]),
    max((share.behind for share in shares), default=None),
    _mean([share.age_s for share in shares]),
  )


def rounds(runs: Sequence[RecordedRun]) -> Table:
  """A row per run: how long its rounds took."""
  columns = (
    _run_column(runs),
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
    _mean([len(each.shares) for each in run.rounds]),
    _mean([e.quorum_s for e in run.rounds if e.quorum_s is not None]),
    _mean(graces),
    graces[int(0.95 * (len(graces) - 1))] if graces else None,
    _mean([each.sync_s for each in run.rounds]),
    100 * sum(b > 0 for b in behind) / len(behind) if behind else None,
    _commonest(run.rounds),
  )


def _commonest(rounds: Sequence[Round]) -> Cell:
  """'everyone is in (92 %)'; reasons that differ in figures only are one."""
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
    _run_column(runs),
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
      summary.bytes_per_parameter(bytes_, pulls, counted.fragments, parameters)
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
        _run_column(runs),
        Column('process'),
        Column('at s', 1),
        Column('how'),
        Column('started again after s', 2),
      ),
      tuple(rows),
    )


def counts(runs: Sequence[RecordedRun]) -> Table:
  """What the syncer counted: summary.json, else the last status.json."""
  names = ('step', 'rounds', 'wall_s', 'goodput', 'uptime', 'refused')
  kinds = list(dict.fromkeys(kind for run in runs for kind in run.records))
  rows = []
  for run in runs:
    told = run.summary or run.status
    found = {'source': None}
    if run.summary:
      found = {'source': 'summary.json'}
      found |= {name: getattr(run.summary, name) for name in names}
    elif told:
      found = {'source': 'status.json'}
      found |= {
        'step': told.step,
        'rounds': told.closed_round,
        'wall_s': None,
        'goodput': told.goodput,
        'uptime': told.uptime,
        'refused': told.refused,
      }
    rows.append(
      (
        run.label,
        found['source'],
        *(found.get(name) for name in names),
        *(run.records.get(kind, 0) for kind in kinds),
      )
    )
  return Table(
    'counts',
    'What the syncer counted',
    (
      _run_column(runs),
      Column('file'),
      *(Column(name, 3) for name in names),
      *(Column(f'tape: {kind}') for kind in kinds),
    ),
    tuple(rows),
    notes=('Tape: how many lines of each kind, besides those of rounds.',),
  )


def _run_column(runs: Sequence[RecordedRun]) -> Column:
  """Files have it always; who sees one run knows which."""
  return Column('run', hidden=len(runs) == 1)


def _mean(values: Sequence[float]) -> float | None:
  return statistics.fmean(values) if values else None
