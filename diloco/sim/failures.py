# SPDX-License-Identifier: Apache-2.0
"""Failures of a fleet: drawn, or read from a cluster's record.

One trace covers the whole fleet, so that systems with different numbers of
learners are compared on the same failures.
"""

import csv
import dataclasses
import math
import pathlib
import random
from collections.abc import Iterable

from diloco.sim.repair import Repair

COLUMNS = ('at_s', 'chip', 'repair_s')


class TraceError(ValueError):
  """An unreadable record of failures; says where, and what would be right."""


@dataclasses.dataclass(frozen=True)
class Interruption:
  """A chip breaks, and its slice is lost until it is repaired.

  Attributes:
    at_s: time since the start of the run.
    place: in [0, 1), position in the fleet: chip ⌊place · N⌋ of N.
    repair_s: time until the slice is back.
  """

  at_s: float
  place: float
  repair_s: float


def rate_per_s(chips: int, mtbi_days: float) -> float:
  """Interruptions of a fleet per second: N / MTBI; 0 if MTBI is inf."""
  return chips / (mtbi_days * 86400)


def draw(
  rate_per_s: float, until_s: float, repair: Repair, rng: random.Random
) -> tuple[Interruption, ...]:
  """Draws Poisson interruptions of a fleet in [0, until_s), in order of time.

  A longer run begins with the same interruptions as a shorter one.

  Args:
    rate_per_s: rate of the whole fleet, see `rate_per_s`; 0: none.
    until_s: end of the trace.
    repair: draws the time until a slice is back.
    rng: seeded by the caller; only this trace draws from it.
  """
  if not rate_per_s >= 0:
    raise ValueError(f'rate_per_s={rate_per_s}, must be at least 0')
  drawn, at_s = [], 0.0
  while rate_per_s > 0:
    at_s += rng.expovariate(rate_per_s)
    if at_s >= until_s:
      break
    drawn.append(Interruption(at_s, rng.random(), repair(rng)))
  return tuple(drawn)


def of_learner(
  interruptions: Iterable[Interruption], learner: int, learners: int
) -> tuple[Interruption, ...]:
  """Returns those that hit `learner` when M learners share the fleet evenly."""
  if not 0 <= learner < learners:
    raise ValueError(f'learner={learner}, must be in 0 … {learners - 1}')
  return tuple(i for i in interruptions if int(i.place * learners) == learner)


def read_csv(path: str | pathlib.Path, chips: int) -> tuple[Interruption, ...]:
  """Reads the failures of a user's cluster, in order of time.

  A UTF-8 text file whose first line names its columns, separated by commas.
  Three are required, in any order; others are ignored. Lines may be in any
  order of time:

  * `at_s`: seconds from the beginning of the record to the failure;
  * `chip`: index of the chip, from 0 to chips − 1; chips of one slice, and
    slices of one learner, are neighbours;
  * `repair_s`: seconds until its slice could be used again; if it never came
    back, until the end of the record.

  Args:
    path: the CSV file.
    chips: N of the cluster.

  Raises:
    TraceError: with the line number, the value, and what would be right.
    OSError: there is no such file.
  """
  with open(path, newline='', encoding='utf-8') as file:
    lines = csv.DictReader(file, strict=True)
    try:
      names = lines.fieldnames or ()
      missing = [name for name in COLUMNS if name not in names]
      if missing:
        raise TraceError(
          f'{path}:1: no column {", ".join(missing)}; the first line must '
          f'name {", ".join(COLUMNS)}, and names {", ".join(names) or "none"}'
        )
      read = [_read(line, f'{path}:{lines.line_num}', chips) for line in lines]
    except csv.Error as error:
      where = f'{path}:{lines.reader.line_num}'
      raise TraceError(f'{where}: not CSV: {error}') from None
    except UnicodeDecodeError as error:
      raise TraceError(f'{path}: not UTF-8 text: {error}') from None
  return tuple(sorted(read, key=lambda interruption: interruption.at_s))


def _read(line: dict, where: str, chips: int) -> Interruption:
  if None in line:
    raise TraceError(
      f'{where}: more values than the first line has names: {line[None]}'
    )
  at_s = _number(line, 'at_s', where)
  chip = _number(line, 'chip', where)
  if not (chip.is_integer() and chip < chips):
    raise TraceError(
      f'{where}: chip={line["chip"]!r}: must be a whole number from 0 to '
      f'{chips - 1}, the cluster has {chips} chips'
    )
  # The middle of a chip's share, so that rounding can't move it.
  return Interruption(
    at_s, (chip + 0.5) / chips, _number(line, 'repair_s', where)
  )


def _number(line: dict, name: str, where: str) -> float:
  try:
    value = float(line[name] or '')
  except ValueError:
    value = math.nan
  if not 0 <= value < math.inf:
    raise TraceError(
      f'{where}: {name}={line[name]!r}: must be a number, finite, at least 0'
    )
  return value
