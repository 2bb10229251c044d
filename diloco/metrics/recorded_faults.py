# SPDX-License-Identifier: Apache-2.0
"""The faults of a chaos run: what hit when, and what the others did."""

import dataclasses
import json

from diloco.metrics.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class RecordedFault:
  """One fault, as the verdict has it; `at_s` since the first learner was
  ready; None: it was not performed.
  """

  number: int
  kind: str
  target: str
  at_s: float | None
  back_s: float | None
  lost_s: float
  stall_s: float
  counted: int | None
  failed: str


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
      begun_s = line['begun_s']
      if begun_s is not None:
        begun_s += course['began_s'] - begin_s
      known = {each.name for each in dataclasses.fields(RecordedFault)}
      fields = {name: line[name] for name in known - {'at_s'}}
      found.append(RecordedFault(at_s=begun_s, **fields))
  except (KeyError, TypeError, AttributeError) as error:
    raise ValueError(f'{workdir.chaos}: no verdict: {error}') from None
  return tuple(found)
