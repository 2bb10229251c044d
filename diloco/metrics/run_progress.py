# SPDX-License-Identifier: Apache-2.0
"""Measures how far a run is: elapsed time, time left, loss of Θ.

A status says which step is reached, but not since when; learners write their
global step and the evaluator the loss of Θ among their scalars.
"""

import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence

from diloco.metrics import jsonl, names
from diloco.metrics.status import RunStatus
from diloco.metrics.workdir import EVALUATOR, Workdir

PACE_S = 60.0  # The time left is judged by the last minute.


@dataclasses.dataclass(frozen=True)
class RunProgress:
  """Progress of a run, besides its status.

  Attributes:
    elapsed_s: since it is followed.
    left_s: until the last step, at the present pace; None: not known yet.
    steps: the global step that each learner last wrote, by process.
    heldout: global step and loss of the Θ that was evaluated last.
  """

  elapsed_s: float
  left_s: float | None = None
  steps: Mapping[str, int] = dataclasses.field(default_factory=dict)
  heldout: tuple[int, float] | None = None


class ProgressMeter:
  """Follows a run; reads no more than the ends of its files.

  Args:
    workdir: of the run; None: nothing but the status is known.
  """

  def __init__(self, workdir: Workdir | None):
    self._workdir = workdir
    self._began_s = time.monotonic()
    self._paces: list[tuple[float, int]] = []  # (time, step) of statuses.

  def look(
    self, status: RunStatus | None, processes: Sequence[str]
  ) -> RunProgress:
    """Returns the progress as the files have it now."""
    elapsed_s, left_s = time.monotonic() - self._began_s, None
    if status is not None:
      now = (status.time_s, status.step)
      recent = [p for p in self._paces if 0 < now[0] - p[0] <= PACE_S]
      # What it took to start says nothing of the pace since.
      while len(recent) > 1 and recent[0][1] == recent[1][1]:
        recent.pop(0)
      self._paces = [*recent, now]
      left_s = _left_s(self._paces, status)
    if self._workdir is None:
      return RunProgress(elapsed_s, left_s)
    steps = {}
    for name in processes:
      last = _newest(self._workdir.metrics(name), names.GLOBAL_STEP)
      if last is not None:
        steps[name] = int(last[names.GLOBAL_STEP])
    found = _newest(self._workdir.metrics(EVALUATOR), names.EVAL_LOSS)
    heldout = found and (int(found['step']), found[names.EVAL_LOSS])
    return RunProgress(elapsed_s, left_s, steps, heldout)


def _left_s(
  paces: Sequence[tuple[float, int]], status: RunStatus
) -> float | None:
  """Returns the seconds left at the pace of these (time, step)."""
  (began_s, began), (now_s, step) = paces[0], paces[-1]
  if step <= began or status.finished:
    return None
  per_s = (step - began) / (now_s - began_s)
  return max(0, status.total_steps - step) / per_s


def _newest(path: pathlib.Path, key: str) -> Mapping | None:
  """Returns the last record of a file; None: there is none with this key."""
  for record in jsonl.from_the_end(path):
    return record if key in record else None
  return None


def count(done: int, of: int, since_s: float) -> str:
  """Returns '2/3, about 0:40 left'.

  Args:
    since_s: when the first of them began, of time.monotonic().
  """
  left_s = (time.monotonic() - since_s) / done * (of - done)
  return f'{done}/{of}' + (f', about {clock(left_s)} left' if left_s else '')


def clock(time_s: float) -> str:
  """Seconds as '0:05', '12:03', '3:12:03'."""
  minutes, seconds = divmod(round(time_s), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}:{minutes:02}:{seconds:02}'
  return f'{minutes}:{seconds:02}'
