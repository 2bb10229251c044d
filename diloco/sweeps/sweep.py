# SPDX-License-Identifier: Apache-2.0
"""Variants of one configuration over several seeds, and their comparison.

An experiment's `sweep(add)` calls `add(label, changes, against=None, at=None)`
for each variant; `--sweep=KEY=V1,V2` is one that is not written down. Finished
runs are not repeated: a sweep resumes after an interruption.
"""

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence

from diloco.metrics import files

RESULT = 'result.json'
VARIANTS = 'sweep.json'
_BOOLS = {'true': True, 'false': False}


Place = tuple[str, str, float]  # Axis, line, x.


class BadResult(ValueError):
  """A file is not what a sweep writes; names the file."""


@dataclasses.dataclass(frozen=True)
class Variant:
  """One row of a sweep."""

  label: str  # Also names its folder.
  changes: Mapping[str, object]  # Flat key to value, such as {'outer.lr': 0.7}.
  # Label of the variant that it is compared with, seed by seed.
  against: str | None = None
  # (axis, line, x), the position of its difference in a chart of that axis,
  # for each chart that has it.
  at: tuple[Place, ...] = ()


@dataclasses.dataclass(frozen=True)
class SeedResult:
  """The result of one run of one seed; losses in nats per token."""

  loss: float
  learners_loss: float  # Of the mean of the learners' parameters.
  curve: tuple[tuple[int, int, float], ...]  # Global step, tokens, loss.
  rounds: int
  participation: float
  goodput: float
  wall_s: float
  merged_tokens: int | None = None  # Included in Θ; None in older results.
  age_steps: float | None = None  # As in `Trained`; None in older results.
  old_share: float | None = None
  # Mean steps between a copy of a fragment and its update.
  delay_steps: float | None = None
  unexplained_tokens: int | None = None  # 0, or the ledger does not balance.
  code: str = ''  # `code.fingerprint`; empty in older results.
  # Of the average over `lab.average_fraction`; None without one.
  average_loss: float | None = None
  # By the name of a loss: that on the first and on the second half of the
  # held-out text; empty in older results, and for a run of processes.
  halves: Mapping[str, tuple[float, float]] = dataclasses.field(
    default_factory=dict
  )

  def loss_of(self, measure: 'Measure') -> float | None:
    """Returns a loss; None: it was not measured."""
    if measure.half is None:
      return getattr(self, measure.name)
    pair = self.halves.get(measure.name)
    return None if pair is None else pair[measure.half]


@dataclasses.dataclass(frozen=True)
class Measure:
  """Which of a run's losses is meant.

  Attributes:
    name: 'loss', of the final parameters, or 'average_loss'.
    half: of the held-out text, 0 or 1; None: all of it.
  """

  name: str = 'loss'
  half: int | None = None


FINAL = Measure()


def variants(sweep: Callable) -> list[Variant]:
  """Returns what `sweep(add)` adds, in its order.

  Raises:
    ValueError: two have one label, one is compared with an unknown one, or has
      a place in a chart and is compared with none.
  """
  known: dict[str, Variant] = {}

  def add(
    label: str,
    changes: Mapping[str, object],
    against: str | None = None,
    at: Place | Sequence[Place] = (),
  ):
    if label in known:
      raise ValueError(f'sweep: two variants are called {label!r}')
    if at and against is None:
      raise ValueError(
        f'sweep: {label!r} stands at {at} in a chart of differences, but is '
        'compared with none'
      )
    known[label] = Variant(label, dict(changes), against, _places(at))

  sweep(add)
  for variant in known.values():
    if variant.against is not None and variant.against not in known:
      raise ValueError(
        f'sweep: {variant.label!r} is compared with {variant.against!r}, which '
        f'is none of {", ".join(known)}'
      )
  return list(known.values())


def of_values(text: str, types: Mapping[str, type]) -> Callable:
  """Returns the `sweep(add)` of values of one key, beside the first of them.

  Args:
    text: KEY=V1,V2,… such as outer.lr=0.3,0.6,1.0.
    types: type of each key.

  Raises:
    ValueError: fewer than two values, or one of another type.
  """
  key, _, given = text.partition('=')
  texts = [each.strip() for each in given.split(',') if each.strip()]
  if len(set(texts)) < 2 or len(set(texts)) < len(texts):
    raise ValueError(
      f'--sweep={text}: must be KEY=V1,V2,… with several values, each once, '
      'such as outer.lr=0.3,0.6,1.0'
    )
  kind = types.get(key, str)  # Of an unknown key the nearest will be named.
  try:
    values = [_BOOLS[x.lower()] if kind is bool else kind(x) for x in texts]
  except (ValueError, KeyError):
    raise ValueError(
      f'--sweep={text}: values of {key} must be {kind.__name__}'
    ) from None

  def sweep(add):
    first, *others = (f'{key} = {x}' for x in texts)
    add(first, {key: values[0]})
    for label, value in zip(others, values[1:], strict=True):
      places = [(key, first, value)] if kind in (int, float) else ()
      add(label, {key: value}, against=first, at=places)

  return sweep


def folder(workdir: pathlib.Path, label: str, seed: int) -> pathlib.Path:
  """Returns the folder of one run."""
  name = ''.join(c if c.isalnum() or c in '.=-_' else '_' for c in label)
  return workdir / name / f'seed-{seed}'


def read(workdir: pathlib.Path, label: str, seed: int) -> SeedResult | None:
  """Returns the result of a finished run; None if there is none."""
  run = folder(workdir, label, seed)
  return read_from(run) if (run / RESULT).exists() else None


def read_from(run: pathlib.Path) -> SeedResult:
  """Returns the result in the folder of a finished run.

  Raises:
    BadResult: it is not one that `write_into` writes.
  """
  path = run / RESULT
  try:
    fields = json.loads(path.read_text())
    fields.pop('health', None)  # 0.1.0 wrote it, and nothing read it.
    return result_of(fields)
  except (ValueError, TypeError, KeyError) as error:
    raise BadResult(f'{path}: is no result of a run: {error}') from None


def result_of(fields: Mapping) -> SeedResult:
  """Returns the result that was written as these fields."""
  halves = {k: tuple(x) for k, x in fields.get('halves', {}).items()}
  curve = tuple(map(tuple, fields['curve']))
  made = {'learners_loss': math.nan, **fields}  # Kept where it was measured.
  return SeedResult(**{**made, 'curve': curve, 'halves': halves})


def fields_of(result: SeedResult) -> dict:
  """Returns a result as JSON keeps it."""
  return {
    field.name: getattr(result, field.name)
    for field in dataclasses.fields(result)
  } | {'halves': dict(result.halves)}


def write_variants(workdir: pathlib.Path, rows: Sequence[Variant]):
  """Writes the variants beside the results, merged with earlier ones."""
  known = {v.label: v for v in read_variants(workdir) or ()}
  known |= {v.label: v for v in rows}
  workdir.mkdir(parents=True, exist_ok=True)
  text = json.dumps([dataclasses.asdict(v) for v in known.values()], indent=1)
  files.replace(workdir / VARIANTS, text.encode())


def read_variants(workdir: pathlib.Path) -> list[Variant] | None:
  """Returns the variants of a sweep; None if no file lists them.

  Raises:
    BadResult: the file is not one that `write_variants` writes.
  """
  path = workdir / VARIANTS
  if not path.exists():
    return None
  try:
    return [_variant(fields) for fields in json.loads(path.read_text())]
  except (ValueError, TypeError, AttributeError) as error:
    raise BadResult(f'{path}: does not list variants: {error}') from None


def _variant(fields: dict) -> Variant:
  return Variant(**fields | {'at': _places(fields.get('at') or ())})


def _places(at: Place | Sequence[Place]) -> tuple[Place, ...]:
  """Returns a tuple of places; a single place need not be in a list."""
  each = [at] if at and isinstance(at[0], str) else at
  return tuple((axis, line, x) for axis, line, x in each)


def write_into(run: pathlib.Path, result: SeedResult):
  """Writes a result into the folder of a run, atomically."""
  run.mkdir(parents=True, exist_ok=True)
  text = json.dumps(fields_of(result))  # A loss may be NaN.
  files.replace(run / RESULT, text.encode())


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A variant over its seeds; intervals are 95 %, by Student's t."""

  variant: Variant
  results: tuple[SeedResult, ...]
  mean: float  # Mean of the losses.
  spread: float  # Their standard deviation; NaN for one seed.
  # Differences to `against`, relative, paired by seed; empty if it is compared
  # with none.
  pairs: tuple[float, ...]

  @property
  def difference(self) -> float | None:
    """Mean of the pairs; None without any."""
    return statistics.fmean(self.pairs) if self.pairs else None

  @property
  def half_width(self) -> float:
    """Half width of the difference's interval; NaN for one seed."""
    return half_width(self.pairs)

  def mean_of(self, name: str) -> float | None:
    """Mean of a field over the results that have it; None if none does."""
    known = [x for r in self.results if (x := getattr(r, name)) is not None]
    return statistics.fmean(known) if known else None

  @property
  def code(self) -> str:
    """Fingerprints of the code that made the results."""
    return ', '.join(sorted({result.code or '-' for result in self.results}))

  @property
  def merged_tokens(self) -> float | None:
    """Mean over the seeds; None if a result is too old to have it."""
    merged = [result.merged_tokens for result in self.results]
    return None if None in merged else statistics.fmean(merged)


def compare(
  results: Mapping[str, Mapping[int, SeedResult]],
  rows: Sequence[Variant],
  measure: Measure = FINAL,
) -> list[Comparison]:
  """Compares the variants that have a result.

  Args:
    results: by label and seed.
    measure: the loss that is compared; results without it are left out.
  """
  compared = []
  for variant in rows:
    mine = _losses(results.get(variant.label, {}), measure)
    if not mine:
      continue
    losses = list(mine.values())
    theirs = _losses(results.get(variant.against, {}), measure)
    pairs = (mine[seed] / theirs[seed] - 1 for seed in mine if seed in theirs)
    compared.append(
      Comparison(
        variant,
        tuple(results[variant.label][seed] for seed in mine),
        statistics.fmean(losses),
        spread(losses),
        tuple(pairs),
      )
    )
  return compared


def _losses(
  results: Mapping[int, SeedResult], measure: Measure
) -> dict[int, float]:
  """Returns the losses that were measured, by seed, ascending."""
  return {
    seed: loss
    for seed, result in sorted(results.items())
    if (loss := result.loss_of(measure)) is not None
  }


def half_width(values: Sequence[float]) -> float:
  """Returns half the 95 % interval of the mean; NaN if `spread` is."""
  if len(values) < 2:
    return math.nan
  from scipy import special  # Most commands that import this do without.

  t = float(special.stdtrit(len(values) - 1, 0.975))  # Two-sided 95 %.
  return t * spread(values) / math.sqrt(len(values))


def spread(values: Sequence[float]) -> float:
  """Standard deviation; NaN for less than two, or if a run diverged."""
  if len(values) < 2 or not all(map(math.isfinite, values)):
    return math.nan
  return statistics.stdev(values)
