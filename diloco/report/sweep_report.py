# SPDX-License-Identifier: Apache-2.0
"""The parts of a page of a sweep: table, losses, differences, trends."""

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence

from diloco.pages.parts import Cell, Chart, Column, Intervals, Line, Part, Table
from diloco.report import sweep_reader
from diloco.report.sweep_reader import RecordedSweep
from diloco.sweeps import sweep
from diloco.sweeps.sweep import Comparison

LOG_FROM = 8.0  # Where the largest x is so many times the least.
LINES_MAX = 7  # Of a chart: as many as there are colours.

COLUMNS = (
  Column('variant'),
  Column('seeds'),
  Column('loss', 4, spread='loss spread'),
  Column('loss spread', 4, hidden=True),
  Column('against'),
  Column('difference %', 2, spread='half of the interval %'),
  Column('half of the interval %', 2, hidden=True),
  Column("learners' mean", 4),
  Column('participation', 2),
  Column('age, steps', 2),
  Column('older than 1.5', 2),
  Column('delay, steps', 2),
  Column('goodput', 2),
  Column('rounds', 0),
  Column('M tokens', 3),
  Column('of them merged', 3),
  Column('wall s', 0),
)


def charts(
  compared: Sequence[Comparison], label: str, suffix: str
) -> Iterator[Chart]:
  """Yields one chart for each axis on which variants have places
  (`Variant.at`).

  Args:
    suffix: suffix of the charts' names, unique among sweeps.
  """
  axes: dict[str, dict[str, list[tuple[float, Comparison]]]] = {}
  for each in compared:
    if each.difference is not None:
      for axis, line, x in each.variant.at:
        axes.setdefault(axis, {}).setdefault(line, []).append((x, each))
  for number, (axis, lines) in enumerate(axes.items()):
    xs = [x for points in lines.values() for x, _ in points]
    yield Chart(
      f'sweep-trend{suffix}-{number}',
      f'{label}: difference against {axis}',
      axis,
      'difference of the loss, % (paired by seed, 95 % interval)',
      tuple(
        _line(name, group, points)
        for group, (name, points) in enumerate(lines.items())
      ),
      log_x=min(xs) > 0 and max(xs) >= LOG_FROM * min(xs),
      notes=('Below zero is better. A point without a bar is of one seed.',),
    )


def _line(
  name: str, group: int, points: Sequence[tuple[float, Comparison]]
) -> Line:
  points = sorted(points, key=lambda point: point[0])
  half_widths = [100 * each.half_width for _, each in points]
  return Line(
    name,
    'simulated',
    tuple(float(x) for x, _ in points),
    tuple(100 * each.difference for _, each in points),
    tuple(0.0 if math.isnan(half) else half for half in half_widths),
    group,
  )


def paragraphs(recorded: RecordedSweep) -> Iterator[str]:
  """Yields remarks on runs without a result, and on gaps."""
  if recorded.missing:
    runs = ', '.join(f'{label} seed {seed}' for label, seed in recorded.missing)
    yield (
      f'{recorded.label}: no result yet of {runs}: still being made, or failed '
      "(see the log in the run's folder)."
    )
  absent = [
    v.label for v in recorded.variants if not recorded.found.get(v.label)
  ]
  if absent:
    yield f'{recorded.label}: nothing is known of {", ".join(absent)}.'
  yield from recorded.gaps


def parts(recorded: RecordedSweep, suffix: str) -> Iterator[Part]:
  """Yields the table, trends, differences, then loss against tokens.

  Args:
    suffix: suffix of the parts' names, unique among sweeps.
  """
  compared = sweep.compare(recorded.found, recorded.variants)
  yield _table(recorded, compared, suffix)
  yield from charts(compared, recorded.label, suffix)
  yield from _against(recorded, compared, suffix)
  yield from _in_parts(
    [
      (each.variant.label, sweep_reader.mean(each.results)) for each in compared
    ],
    f'sweep-loss{suffix}',
    f'{recorded.label}: loss against tokens',
    'validation loss, nats per token',
    'Mean over seeds at the same places of their curves, between which those '
    'of real runs are interpolated; the band is the standard deviation.',
  )


def _table(
  recorded: RecordedSweep, compared: Sequence[Comparison], suffix: str
) -> Table:
  return Table(
    f'sweep{suffix}',
    f'{recorded.label}: variants over their seeds',
    COLUMNS,
    tuple(map(_row, compared)),
    notes=(
      'Loss of the global model on held-out text at the end, nats per token, ± '
      'the standard deviation over seeds, after the tokens of a column at '
      'the right. Difference: mean of the paired '
      'differences, seed by seed, relative to the variant in the column '
      'before, ± half of its 95 % interval (Student).',
    ),
  )


def _row(each: Comparison) -> tuple[Cell, ...]:
  results = each.results
  difference = each.difference
  return (
    each.variant.label,
    len(results),
    each.mean,
    _known(each.spread),
    each.variant.against,
    None if difference is None else 100 * difference,
    _known(100 * each.half_width),
    _known(statistics.fmean(r.learners_loss for r in results)),
    statistics.fmean(r.participation for r in results),
    _mean([r.age_steps for r in results]),
    _mean([r.old_share for r in results]),
    _mean([r.delay_steps for r in results]),
    statistics.fmean(r.goodput for r in results),
    statistics.fmean(r.rounds for r in results),
    statistics.fmean(r.curve[-1][1] for r in results if r.curve) / 1e6,
    None if each.merged_tokens is None else each.merged_tokens / 1e6,
    statistics.fmean(r.wall_s for r in results),
  )


def _mean(values: Sequence[float | None]) -> float | None:
  """Returns the mean of the known values; None if there are none."""
  known = [value for value in values if value is not None]
  return statistics.fmean(known) if known else None


def _known(value: float) -> float | None:
  return None if math.isnan(value) else value


def _against(
  recorded: RecordedSweep, compared: Sequence[Comparison], suffix: str
) -> Iterator[Part]:
  """Yields differences at the end and over time, for each base of
  comparison.
  """
  with_pairs = [each for each in compared if each.difference is not None]
  bases = list(dict.fromkeys(each.variant.against for each in with_pairs))
  for number, base in enumerate(bases):
    several = f'-{number}' if len(bases) > 1 else ''
    of_base = [each for each in with_pairs if each.variant.against == base]
    yield from _intervals(
      recorded, of_base, base, f'sweep-differences{suffix}{several}'
    )
    yield from _in_parts(
      [(each.variant.label, _gap(recorded, each)) for each in of_base],
      f'sweep-gap{suffix}{several}',
      f'On the way, against {base!r}',
      'difference of the loss at equal tokens, %',
      'Paired by seed, mean and standard deviation over seeds; the loss of '
      f'{base!r} is interpolated between its evaluations. The first '
      f'{sweep_reader.LEFT_OUT:.0%} of the tokens are left out.',
    )


def _gap(recorded: RecordedSweep, each: Comparison) -> sweep_reader.SweepCurve:
  mine = recorded.found[each.variant.label]
  return sweep_reader.gap(mine, recorded.found[each.variant.against])


def _intervals(
  recorded: RecordedSweep,
  of_base: Sequence[Comparison],
  base: str,
  name: str,
) -> Iterator[Intervals]:
  rows = [
    (
      f'{each.variant.label} (n = {_pairs(recorded, each)})',
      100 * each.difference,
      _known(100 * each.half_width),
    )
    for each in of_base
    if math.isfinite(each.difference)
  ]
  if rows:
    yield Intervals(
      name,
      f'At the end, against {base!r}',
      'difference of the loss, % (paired by seed, 95 % interval)',
      tuple(rows),
      notes=(
        'Left of zero is better. Grey: the interval has both signs; a cross: '
        'one seed gives none.',
      ),
    )


def _pairs(recorded: RecordedSweep, each: Comparison) -> int:
  mine = recorded.found[each.variant.label]
  return len(mine.keys() & recorded.found[each.variant.against].keys())


def _in_parts(
  curves: Sequence[tuple[str, sweep_reader.SweepCurve]],
  name: str,
  title: str,
  y_label: str,
  note: str,
) -> Iterator[Chart]:
  """Splits curves into charts such that no two lines of one share a colour."""
  curves = [(label, curve) for label, curve in curves if len(curve.tokens) > 1]
  chunks = [curves[i : i + LINES_MAX] for i in range(0, len(curves), LINES_MAX)]
  for number, chunk in enumerate(chunks, start=1):
    several = len(chunks) > 1
    yield Chart(
      f'{name}-part-{number}' if several else name,
      f'{title} ({number} of {len(chunks)})' if several else title,
      'tokens trained by all learners',
      y_label,
      tuple(
        Line(label, 'validation', *dataclasses.astuple(curve), group=group)
        for group, (label, curve) in enumerate(chunk)
      ),
      notes=(note,),
    )
