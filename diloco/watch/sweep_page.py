# SPDX-License-Identifier: Apache-2.0
"""The page of a sweep: table, differences, trends, losses against tokens."""

import dataclasses
import math
import pathlib
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from diloco.metrics import figures
from diloco.pages.parts import (
  Badge,
  Cell,
  Chart,
  Column,
  Intervals,
  Line,
  Part,
  Table,
  Tile,
)
from diloco.sweeps import sweep
from diloco.sweeps.sweep import Comparison, SeedResult, Variant

SEED = re.compile(r'seed-(\d+)')
CurvePlace = tuple[int, float, float]  # Global step, tokens, y.
LEFT_OUT = 0.1  # Of the tokens: the beginning, where losses fall at once.
LOG_FROM = 8.0  # Where the largest x is so many times the least.
# Fields of a result with a column of their means, left to right.
MEANS = (
  'participation', 'age_steps', 'old_share', 'delay_steps', 'goodput', 'rounds',
)  # fmt: skip
LINES_MAX = 7  # Of a chart: as many as there are colours.
DIFFERENCE = 'difference of the loss, % (paired by seed, 95 % interval)'


@dataclasses.dataclass(frozen=True)
class RecordedSweep:
  """The results found of a sweep."""

  label: str  # Distinguishes it from others on the page.
  folder: pathlib.Path
  variants: tuple[Variant, ...]  # In the order of the sweep, as far as known.
  # Results by variant's label and seed.
  results: Mapping[str, Mapping[int, SeedResult]]
  # (label, seed) of runs that were begun and have no result.
  missing: tuple[tuple[str, int], ...]
  gaps: tuple[str, ...]  # Sentences on what is missing.


def is_sweep(folder: pathlib.Path) -> bool:
  """Returns True for the folder of a sweep, or of one run of the lab."""
  return (folder / sweep.RESULT).exists() or bool(_seeds(folder))


def read(folder: pathlib.Path, label: str) -> RecordedSweep:
  """A folder of a sweep, of real runs or the lab's, or of one of its runs.

  Raises:
    BadResult: a file is not what a sweep writes.
  """
  if (folder / sweep.RESULT).exists():
    alone = Variant(folder.name, {})
    result = sweep.read_from(folder)
    return RecordedSweep(
      label, folder, (alone,), {alone.label: {0: result}}, (), ()
    )
  gaps = []
  seeds = _seeds(folder)
  variants = sweep.read_variants(folder)
  if variants is None:
    gaps.append(
      f'{folder / sweep.VARIANTS} is missing: it is not known what was to be '
      'compared with what. The command that made the sweep writes it, and '
      'makes no finished run again.'
    )
    variants = [Variant(name, {}) for name in sorted(seeds)]
  known = {sweep.folder(folder, v.label, 0).parent.name for v in variants}
  variants += [Variant(n, {}) for n in sorted(seeds) if n not in known]
  results, missing = {}, []
  for variant in variants:
    name = sweep.folder(folder, variant.label, 0).parent.name
    for seed, path in seeds.get(name, {}).items():
      if (path / sweep.RESULT).exists():
        results.setdefault(variant.label, {})[seed] = sweep.read_from(path)
      else:
        missing.append((variant.label, seed))
  return RecordedSweep(
    label, folder, tuple(variants), results, tuple(missing), tuple(gaps)
  )


def _seeds(folder: pathlib.Path) -> dict[str, dict[int, pathlib.Path]]:
  """Folders of runs by the name of the variant's folder and seed."""
  seeds: dict[str, dict[int, pathlib.Path]] = {}
  for path in folder.glob('*/seed-*'):
    if (match := SEED.fullmatch(path.name)) and path.is_dir():
      seeds.setdefault(path.parent.name, {})[int(match[1])] = path
  return {name: dict(sorted(each.items())) for name, each in seeds.items()}


@dataclasses.dataclass(frozen=True)
class SweepCurve:
  """Means over seeds and their standard deviations, against tokens."""

  tokens: tuple[float, ...]
  means: tuple[float, ...]
  spreads: tuple[float, ...]


def mean(results: Sequence[SeedResult]) -> SweepCurve:
  """Returns the mean of the losses, as far as all seeds have them.

  Seeds are evaluated at not quite the same numbers of tokens: their losses are
  interpolated.
  """
  return _curve([each.curve for each in results])


def gap(
  mine: Mapping[int, SeedResult], theirs: Mapping[int, SeedResult]
) -> SweepCurve:
  """Relative differences of losses at equal tokens, in percent, by seed.

  Args:
    mine: results by seed.
    theirs: of the variant that they are compared with.

  Returns:
    A curve without points where no seed has both.
  """
  seeds = sorted(mine.keys() & theirs.keys())
  return _curve([_gap(mine[seed], theirs[seed]) for seed in seeds])


def _gap(mine: SeedResult, theirs: SeedResult) -> list[CurvePlace]:
  if not mine.curve or not theirs.curve:
    return []
  _, xs, ys = zip(*theirs.curve)
  from_tokens = max(LEFT_OUT * mine.curve[-1][1], xs[0])
  return [
    (step, tokens, 100.0 * (loss / float(np.interp(tokens, xs, ys)) - 1.0))
    for step, tokens, loss in mine.curve
    if tokens >= from_tokens
  ]


def _curve(of_seeds: Sequence[Sequence[CurvePlace]]) -> SweepCurve:
  """Interpolates the seeds at equal tokens; the last place is their ends.

  There are as many places as the seed with the fewest has, at most. Where one
  has diverged, nothing is shown.
  """
  if not of_seeds or not all(of_seeds):
    return SweepCurve((), (), ())
  first = max(each[0][1] for each in of_seeds)
  last = min(each[-1][1] for each in of_seeds)
  fewest = min(of_seeds, key=len)
  at = sorted({max(tokens, first) for _, tokens, _ in fewest if tokens < last})
  ends = [each[-1] for each in of_seeds]
  places = [(tokens, [_at(each, tokens) for each in of_seeds]) for tokens in at]
  end = statistics.fmean(tokens for _, tokens, _ in ends)
  places.append((end, [y for *_, y in ends]))
  finite = [each for each in places if all(map(math.isfinite, each[1]))]
  return SweepCurve(
    tuple(tokens for tokens, _ in finite),
    tuple(statistics.fmean(ys) for _, ys in finite),
    tuple(sweep.spread(ys) if len(ys) > 1 else 0.0 for _, ys in finite),
  )


def _at(curve: Sequence[CurvePlace], tokens: float) -> float:
  _, xs, ys = zip(*curve)
  return float(np.interp(tokens, xs, ys))


# The parts of the page --------------------------------------------------------


def sentences(recorded: RecordedSweep) -> list[str]:
  """Returns remarks on runs without a result, and on gaps."""
  lines = list(recorded.gaps)
  if recorded.missing:
    runs = ', '.join(f'{label} seed {seed}' for label, seed in recorded.missing)
    lines.append(
      f'{recorded.label}: no result yet of {runs}: still being made, or failed '
      "(see the log in the run's folder)."
    )
  absent = [
    v.label for v in recorded.variants if not recorded.results.get(v.label)
  ]
  if absent:
    lines.append(f'{recorded.label}: nothing is known of {", ".join(absent)}.')
  return lines


def tiles(recorded: RecordedSweep) -> Iterator[Tile]:
  """Yields the best variant, and how many of its runs have a result."""
  compared = sweep.compare(recorded.results, recorded.variants)
  finite = [each for each in compared if math.isfinite(each.mean)]
  if finite:
    best = min(finite, key=lambda each: each.mean)
    note = best.variant.label
    if best.difference is not None:
      half = _known(100 * best.half_width)
      note += f': {100 * best.difference:+.2f}'
      note += f' ± {half:.2f} %' if half is not None else ' %'
      note += f' against {best.variant.against}'
    yield Tile('lowest held-out loss of Θ', f'{best.mean:.3f}', note, True)
  done = sum(map(len, recorded.results.values()))
  yield Tile('runs', str(done), f'of {done + len(recorded.missing)} begun')


def head(recorded: RecordedSweep) -> dict:
  """Returns the fields of a page about one sweep alone.

  It is green once all runs that were begun have a result.
  """
  lacking = len(recorded.missing)
  badge = Badge(f'{lacking} runs without a result', 'wait')
  return {
    'where': str(recorded.folder.resolve()),
    'badge': badge if lacking else Badge('finished', 'good'),
    'tiles': tuple(tiles(recorded)),
  }


def sections(recorded: RecordedSweep, suffix: str = '') -> Iterator[Part]:
  """Yields the table, differences, trends, then loss against tokens.

  Args:
    suffix: suffix of the parts' names, unique among sweeps.
  """
  compared = sweep.compare(recorded.results, recorded.variants)
  yield _table(recorded, compared, suffix)
  with_pairs = [each for each in compared if each.difference is not None]
  bases = list(dict.fromkeys(each.variant.against for each in with_pairs))
  for number, base in enumerate(bases):
    of_base = [each for each in with_pairs if each.variant.against == base]
    yield from _intervals(recorded, of_base, base, f'{suffix}-{number}')
  yield from _trends(with_pairs, recorded.label, suffix)
  yield from _curves(
    [(each.variant.label, mean(each.results)) for each in compared],
    f'sweep-loss{suffix}',
    f'{recorded.label}: held-out loss against tokens',
    'nats per token',
    'Mean over seeds at equal tokens, between whose evaluations losses are '
    'interpolated; the band is the standard deviation.',
  )
  for number, base in enumerate(bases):
    of_base = [x.variant.label for x in with_pairs if x.variant.against == base]
    results = recorded.results
    yield from _curves(
      [(label, gap(results[label], results[base])) for label in of_base],
      f'sweep-gap{suffix}-{number}',
      f'On the way, against {base!r}',
      'difference of the loss at equal tokens, %',
      'Paired by seed, mean and standard deviation over seeds; the loss of '
      f'{base!r} is interpolated between its evaluations. The first '
      f'{LEFT_OUT:.0%} of the tokens are left out.',
    )


def _table(
  recorded: RecordedSweep, compared: Sequence[Comparison], suffix: str
) -> Table:
  """Returns a row per variant; a column that nothing is known for is hidden."""
  goodput = figures.named('goodput')
  columns = (
    Column('variant'),
    Column('seeds'),
    Column('loss', 4, spread='loss spread'),
    Column('loss spread', 4, hidden=True),
    Column('against'),
    Column('difference %', 2, spread='half of the interval %'),
    Column('half of the interval %', 2, hidden=True),
    Column("learners' mean", 4),
    Column('participation', format=figures.named('participation').format),
    Column('age, steps', 2),
    Column('older than 1.5', format=figures.named('old_share').format),
    Column('delay, steps', 2),
    Column(goodput.label, format=goodput.format),
    Column('rounds', 0),
    Column('M tokens', 3),
    Column('of them merged', 3),
    Column('wall s', 0),
  )
  rows = tuple(map(_row, compared))
  unknown = [all(row[i] is None for row in rows) for i in range(len(columns))]
  return Table(
    f'sweep{suffix}',
    f'{recorded.label}: variants over their seeds',
    tuple(
      dataclasses.replace(column, hidden=column.hidden or none)
      for column, none in zip(columns, unknown)
    ),
    rows,
    notes=(
      'Loss of the global model on held-out text at the end, nats per token, ± '
      'the standard deviation over seeds. Difference: mean of the paired '
      'differences, seed by seed, relative to the variant in the column '
      'before, ± half of its 95 % interval (Student).',
    ),
  )


def _row(comparison: Comparison) -> tuple[Cell, ...]:
  results, difference = comparison.results, comparison.difference
  merged_tokens = comparison.merged_tokens
  last_tokens = [r.curve[-1][1] for r in results if r.curve]
  return (
    comparison.variant.label,
    len(results),
    comparison.mean,
    _known(comparison.spread),
    comparison.variant.against,
    None if difference is None else 100 * difference,
    _known(100 * comparison.half_width),
    _known(statistics.fmean(r.learners_loss for r in results)),
    *map(comparison.mean_of, MEANS),
    statistics.fmean(last_tokens) / 1e6 if last_tokens else None,
    None if merged_tokens is None else merged_tokens / 1e6,
    comparison.mean_of('wall_s'),
  )


def _known(value: float) -> float | None:
  return None if math.isnan(value) else value


def _intervals(
  recorded: RecordedSweep, of_base: Sequence[Comparison], base: str, suffix: str
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
      f'sweep-differences{suffix}',
      f'At the end, against {base!r}',
      DIFFERENCE,
      tuple(rows),
      notes=(
        'Left of zero is better. Grey: the interval has both signs; a ring: '
        'one seed gives none.',
      ),
    )


def _pairs(recorded: RecordedSweep, comparison: Comparison) -> int:
  mine = recorded.results[comparison.variant.label]
  return len(mine.keys() & recorded.results[comparison.variant.against].keys())


def _trends(
  compared: Sequence[Comparison], label: str, suffix: str
) -> Iterator[Chart]:
  """Yields a chart for each axis on which several variants have places.

  The base of a comparison has none: its difference is zero by definition.
  """
  axes: dict[str, dict[str, list[tuple[float, Comparison]]]] = {}
  for each in compared:
    for axis, line, x in each.variant.at:
      axes.setdefault(axis, {}).setdefault(line, []).append((x, each))
  for number, (axis, lines) in enumerate(axes.items()):
    xs = {x for points in lines.values() for x, _ in points}
    if len(xs) > 1:  # One place is no trend; `_intervals` has it.
      yield Chart(
        f'sweep-trend{suffix}-{number}',
        f'{label}: difference against {axis}',
        axis,
        DIFFERENCE,
        tuple(
          _trend(name, group, points)
          for group, (name, points) in enumerate(lines.items())
        ),
        log_x=min(xs) > 0 and max(xs) >= LOG_FROM * min(xs),
        notes=('Below zero is better. A point without a bar is of one seed.',),
      )


def _trend(
  name: str, group: int, points: Sequence[tuple[float, Comparison]]
) -> Line:
  points = sorted(points, key=lambda point: point[0])
  return Line(
    name,
    'simulated',
    tuple(float(x) for x, _ in points),
    tuple(100 * each.difference for _, each in points),
    tuple(100 * (_known(each.half_width) or 0.0) for _, each in points),
    group,
  )


def _curves(
  curves: Sequence[tuple[str, SweepCurve]],
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
