# SPDX-License-Identifier: Apache-2.0
"""The faults of a chaos run: what hit when, and what the others did."""

import dataclasses
import json
from collections.abc import Iterator, Sequence

from diloco.metrics.workdir import Workdir
from diloco.pages.parts import Cell, Column, Table

COLUMNS = (
  Column('fault'),
  Column('kind'),
  Column('target'),
  Column('at s', 1),
  Column('back after s', 1),
  Column('lost, learner·s', 1),
  Column("others' longest stall s", 2),
  Column('counted by the relay'),
  Column('why not'),
)
NOTE = (
  'Back: merged again, or a round closed again. Lost: time of its target '
  'without a step meanwhile. Longest stall: between two steps of any learner '
  'that no fault explains, less its usual step. Counted: bytes that were held, '
  'delayed or throttled, or chunks that stalled.'
)


@dataclasses.dataclass(frozen=True)
class RecordedFault:
  """One fault, as the verdict has it; `at_s` since the first learner was
  ready; None: it was not performed.
  """

  number: int
  kind: str
  target: str
  at_s: float | None
  counted: int | None
  back_s: float | None
  lost_s: float
  stall_s: float
  failed: str

  @property
  def row(self) -> tuple[Cell, ...]:
    """Its cells under `COLUMNS`."""
    return (
      self.number,
      self.kind,
      self.target,
      self.at_s,
      self.back_s,
      self.lost_s,
      self.stall_s,
      self.counted,
      self.failed,
    )


def read(workdir: Workdir, begin_s: float) -> tuple[RecordedFault, ...]:
  """Returns the faults of a run; none if it was no chaos run, or not judged.

  Args:
    begin_s: since the epoch; what times are counted from.

  Raises:
    ValueError: a file is not what a chaos run writes.
  """
  try:
    verdict = json.loads((workdir.chaos / 'verdict.json').read_text())
    course = json.loads((workdir.chaos / 'course.json').read_text())
  except FileNotFoundError:
    return ()
  try:
    found = []
    for line in verdict['outcomes']:
      begun_s = line.pop('begun_s')
      if begun_s is not None:
        begun_s += course['began_s'] - begin_s
      found.append(RecordedFault(at_s=begun_s, **line))
  except (KeyError, TypeError, AttributeError) as error:
    raise ValueError(f'{workdir.chaos}: no verdict: {error}') from None
  return tuple(found)


def table(
  faults: Sequence[RecordedFault], name: str, title: str
) -> Iterator[Table]:
  """A row per fault; no table where there was none."""
  if faults:
    rows = tuple(fault.row for fault in faults)
    yield Table(name, title, COLUMNS, rows, (NOTE,))
