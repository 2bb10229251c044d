# SPDX-License-Identifier: Apache-2.0
"""Tables of what the syncer saw of a run: rounds, bytes, counts."""

import collections
import re
from collections.abc import Sequence

from diloco.metrics import summary
from diloco.pages.parts import Cell, Column, Table
from diloco.reports.recorded_run import RecordedRun, Round
from diloco.reports.run_tables import mean, run_column

# Of a RunSummary.
COUNTED = ('step', 'rounds', 'wall_s', 'goodput', 'uptime', 'refused')


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


def _commonest(rounds: Sequence[Round]) -> Cell:
  """Returns the commonest reason, as in 'everyone is in (92 %)'.

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


def counts(runs: Sequence[RecordedRun]) -> Table:
  """Returns the syncer's counts, from summary.json or the last status.json."""
  kinds = list(dict.fromkeys(kind for run in runs for kind in run.records))
  rows = [
    (
      run.label,
      *_counted(run),
      *(run.records.get(kind, 0) for kind in kinds),
    )
    for run in runs
  ]
  return Table(
    'counts',
    'What the syncer counted',
    (
      run_column(runs),
      Column('file'),
      *(Column(name, 3) for name in COUNTED),
      *(Column(f'tape: {kind}') for kind in kinds),
    ),
    tuple(rows),
    notes=(
      'A syncer that was started again counts uptime anew; the first table '
      'has that of the whole run.',
      'Tape: how many lines of each kind, besides those of rounds.',
    ),
  )


def _counted(run: RecordedRun) -> tuple[Cell, ...]:
  """The file, and COUNTED as it says."""
  if run.summary:
    return 'summary.json', *(getattr(run.summary, name) for name in COUNTED)
  if told := run.status:
    counted = told.step, told.closed_round, None, told.goodput, told.uptime
    return 'status.json', *counted, told.refused
  return None, *[None] * len(COUNTED)
