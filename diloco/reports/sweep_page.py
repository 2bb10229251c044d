# SPDX-License-Identifier: Apache-2.0
"""The parts of a page that a sweep has: its table, losses, differences."""

import math
import statistics
from collections.abc import Iterator, Sequence

from diloco.lab import sweep
from diloco.lab.sweep import Comparison
from diloco.pages.parts import Cell, Chart, Column, Line, Part, Table
from diloco.reports.sweep_reading import RecordedSweep

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
  Column('goodput', 2),
  Column('rounds', 0),
  Column('M tokens', 3),
  Column('wall s', 0),
)


def paragraphs(recorded: RecordedSweep) -> Iterator[str]:
  """What to know before one looks: runs without a result, and gaps."""
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
  """Its table, then loss against tokens.

  Args:
    recorded: the sweep.
    suffix: of the parts' names, so that no two sweeps have the same.
  """
  compared = sweep.compare(recorded.found, recorded.variants)
  yield _table(recorded, compared, suffix)
  yield from _charts(recorded, compared, suffix)


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
      'the standard deviation over seeds. Difference: mean of the paired '
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
    statistics.fmean(r.goodput for r in results),
    statistics.fmean(r.rounds for r in results),
    statistics.fmean(r.curve[-1][1] for r in results if r.curve) / 1e6,
    statistics.fmean(r.wall_s for r in results),
  )


def _known(value: float) -> float | None:
  return None if math.isnan(value) else value


def _charts(
  recorded: RecordedSweep, compared: Sequence[Comparison], suffix: str
) -> Iterator[Chart]:
  """So many that no line has another's colour."""
  chunks = [
    compared[i : i + LINES_MAX] for i in range(0, len(compared), LINES_MAX)
  ]
  for number, chunk in enumerate(chunks):
    lines = [
      Line(each.variant.label, 'validation', *curve, group=group)
      for group, each in enumerate(chunk)
      if (curve := _curve(each))[0]
    ]
    if lines:
      more = f' ({number + 1} of {len(chunks)})' if len(chunks) > 1 else ''
      part = f'-part-{number + 1}' if len(chunks) > 1 else ''
      yield Chart(
        f'sweep-loss{suffix}{part}',
        f'{recorded.label}: loss against tokens{more}',
        'tokens trained by all learners',
        'validation loss, nats per token',
        tuple(lines),
        notes=(
          'Mean over seeds at the same places of their curves; the band is the '
          'standard deviation.',
        ),
      )


def _curve(each: Comparison) -> tuple[tuple[float, ...], ...]:
  """Tokens, losses and their spreads, as far as all seeds have them."""
  places = list(zip(*(result.curve for result in each.results)))
  tokens = [statistics.fmean(t for _, t, _ in place) for place in places]
  losses = [statistics.fmean(x for *_, x in place) for place in places]
  spreads = [
    statistics.stdev(x for *_, x in place) if len(place) > 1 else 0.0
    for place in places
  ]
  return tuple(tokens), tuple(losses), tuple(spreads)
