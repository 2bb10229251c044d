# SPDX-License-Identifier: Apache-2.0
"""The table of the fault benchmark: figures down, faults side by side."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import rich.table

from diloco.metrics.workdir import learner_name
from diloco.pages import text_tables
from tests.chaos.fault_scenarios import SCENARIOS, Measured

# Scenario -> what each repetition measured.
Repetitions = Mapping[str, Sequence[Measured]]


@dataclasses.dataclass(frozen=True)
class Unit:
  """The format of a number."""

  scale: float
  digits: int
  word: str

  def show(self, value: float) -> str:
    return f'{value * self.scale:.{self.digits}f}'


MS = Unit(1e3, 0, 'ms')
S = Unit(1, 2, 's')
PERCENT = Unit(1e2, 1, '%')
POINTS = Unit(1, 1, 'points')
COUNT = Unit(1, 0, '')
PER_S = Unit(1, 1, '1/s')


@dataclasses.dataclass(frozen=True)
class Row:
  """A row shows one number, by the name under which a scenario returns it."""

  name: str
  title: str
  unit: Unit
  most: float | None = None  # The target: not more than this,
  least: float | None = None  # or not less.

  @property
  def target(self) -> str:
    if self.most is not None:
      return f'≤ {self.unit.show(self.most)} {self.unit.word}'.strip()
    if self.least is not None:
      return f'≥ {self.unit.show(self.least)} {self.unit.word}'.strip()
    return ''

  def worst(self, values: Sequence[float]) -> float:
    """The lowest where more is better, else the highest."""
    falls = self.least is not None or self.unit in (PERCENT, PER_S)
    return min(values) if falls else max(values)

  def is_met(self, value: float) -> bool:
    if self.most is not None:
      return value <= self.most
    return self.least is None or value >= self.least


STALL_S = 0.05
MERGE_S = 2.0
POINT = 1.0


def rows(learners: int) -> list[Row]:
  """Returns all figures, in the order of the table."""
  each = [learner_name(m) for m in range(learners)]
  return [
    *_each('stall_max_s', 'longest stall', each, STALL_S),
    *_each('stall_p99_s', 'p99 of stalls', each, None),
    *_each('excess_max_s', 'longest step beyond floor', each, STALL_S),
    Row('stall_max_s_during', 'longest stall, away', MS, STALL_S),
    Row('stall_max_s_starting', 'longest stall, it starts', MS, STALL_S),
    Row('stall_max_s_after', 'longest stall, back', MS, STALL_S),
    Row('goodput_before', 'goodput, before', PERCENT),
    Row('goodput_during', 'goodput, away', PERCENT),
    Row('goodput_starting', 'goodput, it starts', PERCENT),
    Row('goodput_after', 'goodput, back', PERCENT),
    Row('goodput_points_during', 'goodput change, away', POINTS, least=-POINT),
    Row('goodput_points_after', 'goodput change, back', POINTS, least=-POINT),
    Row('steps_per_s_before', 'steps/s, before', PER_S),
    Row('steps_per_s_during', 'steps/s, away', PER_S),
    Row('steps_per_s_starting', 'steps/s, it starts', PER_S),
    Row('steps_per_s_after', 'steps/s, back', PER_S),
    Row('pace_points_during', 'steps/s change, away', POINTS, least=-POINT),
    Row('pace_points_after', 'steps/s change, back', POINTS, least=-POINT),
    Row('fault_to_merge_s', 'fault to next merge', S, MERGE_S),
    Row('merge_gap_max_s', 'longest time without a merge', S, MERGE_S),
    Row('restart_to_listens_s', 'restart to "listens"', S),
    Row('listens_to_merge_s', '"listens" to next merge', S, MERGE_S),
    Row('listens_to_all_merged_s', '"listens" to all merged', S),
    Row('restart_to_ready_s', 'restart to "ready"', S),
    Row('ready_to_merged_s', '"ready" to first contribution', S),
    Row('restart_to_merged_s', 'restart to first contribution', S),
    Row('went_on_to_merged_s', 'SIGCONT to first contribution', S),
    Row('versions_wrong', 'versions not rising by one', COUNT, 0.0),
  ]  # fmt: skip


def _each(
  name: str, title: str, learners: Sequence[str], most: float | None
) -> list[Row]:
  return [Row(f'{name}/{m}', f'{title}, {m}', MS, most) for m in learners]


def show(title: str, learners: int, measured: Repetitions) -> rich.table.Table:
  """Median and worst of the repetitions; '!' where the worst misses."""
  cells = {
    row: [_cell(row, measured.get(name, ())) for name in SCENARIOS]
    for row in rows(learners)
  }
  view = text_tables.table(
    title,
    ('', 'unit', *SCENARIOS, 'target'),
    [
      (row.title, row.unit.word, *shown, row.target)
      for row, shown in cells.items()
      if any(shown)
    ],
    left=2,
  )
  view.caption = (
    'median (worst) of the repetitions; of several learners the worst; '
    'learners that the fault hits are left out; ! misses the target'
  )
  view.caption_justify = 'left'
  return view


def summary(learners: int, measured: Repetitions) -> list[dict]:
  """Returns the table as plain data: one entry per number and scenario."""
  found = []
  for row in rows(learners):
    for name in SCENARIOS:
      if values := _values(row, measured.get(name, ())):
        worst = row.worst(values)
        found.append(
          {
            'figure': row.name,
            'scenario': name,
            'median': statistics.median(values),
            'worst': worst,
            'values': values,
            'target': row.target,
            'met': row.is_met(worst),
          }
        )
  return found


def _values(row: Row, repetitions: Sequence[Measured]) -> list[float]:
  return [each[row.name] for each in repetitions if row.name in each]


def _cell(row: Row, repetitions: Sequence[Measured]) -> str:
  values = _values(row, repetitions)
  if not values:
    return ''
  worst = row.worst(values)
  shown = row.unit.show(statistics.median(values))
  if len(values) > 1:
    shown += f' ({row.unit.show(worst)})'
  return shown if row.is_met(worst) else f'{shown} !'
