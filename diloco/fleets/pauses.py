# SPDX-License-Identifier: Apache-2.0
"""The pause of a learner that re-forms with fewer slices, or with more.

`pauses.json` has what was measured, an entry for each kind of learner, way and
machine; `write_pause` adds one. Where nothing is said the planner and the
simulator take the paper's, which is our fit, and give what was measured next to
it.
"""

import dataclasses
import functools
import importlib.resources
import json
import math
import pathlib
from collections.abc import Iterator, Sequence

from diloco.metrics import files

FITTED_S = 13.7  # To the paper's Table 1 as a whole; down and up alike.
FILE = 'pauses.json'
WAYS = {
  'standby': 'processes and programs for the other number of slices are ready',
  'cold': 'they start, and are compiled, when it happens',
}


@dataclasses.dataclass(frozen=True)
class MeasuredPause:
  """How long a learner stood when it lost a slice, and when it took it back.

  From the last step before to the first one after, medians over repetitions.

  Raises:
    ValueError: names each field that makes no sense, and what would be right.
  """

  params: float  # Parameters of the model.
  slices: int  # Of the learner, all there; it lost one.
  hosts: int  # Of each slice.
  how: str  # A key of `WAYS`.
  shrink_s: float  # With the loss, the time in which it is noticed included.
  regrow_s: float  # With the return.
  machine: str  # Its kind, such as 'CPU', 'AMD EPYC, 2 cores' or 'v5e'.
  date: str  # Such as '2026-11-28'.
  commit: str  # Of the code that was measured.

  def __post_init__(self):
    if broken := list(self._broken()):
      raise ValueError('; '.join(broken))

  def _broken(self) -> Iterator[str]:
    for key, least, kind in (
      ('params', 1, (int, float)),
      ('slices', 2, int),
      ('hosts', 1, int),
      ('shrink_s', 0, (int, float)),
      ('regrow_s', 0, (int, float)),
    ):
      value = getattr(self, key)
      is_number = isinstance(value, kind) and not isinstance(value, bool)
      if not is_number or not least <= value < math.inf:
        what = 'a whole number' if kind is int else 'a finite number'
        yield f'{key}={value!r}: must be {what}, at least {least}'
    if self.how not in WAYS:
      yield f'how={self.how!r}: must be one of {", ".join(WAYS)}'
    for key in ('machine', 'date', 'commit'):
      value = getattr(self, key)
      if not isinstance(value, str) or not value:
        yield f'{key}={value!r}: must be a text'

  @property
  def pause_s(self) -> float:
    """Seconds of one pause: a lost slice costs one of each kind."""
    return (self.shrink_s + self.regrow_s) / 2

  @property
  def setup(self) -> tuple:
    """The key of an entry: model, slices, hosts, way and machine."""
    return self.params, self.slices, self.hosts, self.how, self.machine

  def __str__(self) -> str:
    """Formats an entry: 'measured here: 10 M, 3 slices of 1 host, CPU, …'."""
    hosts = f'{self.hosts} host{"s" if self.hosts > 1 else ""}'
    return (
      f'measured here: {self.params / 1e6:.4g} M, {self.slices} slices of '
      f'{hosts}, {self.machine}, {self.how}'
    )


@functools.cache
def measured() -> tuple[MeasuredPause, ...]:
  """Returns the measured pauses of the package; there may be none."""
  return _parse((importlib.resources.files('diloco.fleets') / FILE).read_text())


def read(path: pathlib.Path) -> tuple[MeasuredPause, ...]:
  """Returns the entries of a file; none if it is not there, or empty.

  Raises:
    ValueError: names the file, the entry and what is wrong with it.
  """
  text = path.read_text().strip() if path.exists() else ''
  try:
    return _parse(text or '[]')
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from None


def write_pause(entry: MeasuredPause, path: pathlib.Path) -> None:
  """Puts an entry into a file such as `diloco/fleets/pauses.json`.

  It replaces that of the same model, slices, hosts, way and machine; all others
  stay. The file is replaced as a whole, or not at all.

  Raises:
    ValueError: as `read`; the file stays as it is.
  """
  others = [each for each in read(path) if each.setup != entry.setup]
  files.write_json(path, sorted((*others, entry), key=lambda x: x.setup))


def nearest(
  params: float, among: Sequence[MeasuredPause]
) -> tuple[MeasuredPause, ...]:
  """Returns of each way the entry whose model is the nearest in size."""
  found = {}
  for entry in among:
    off = abs(math.log(entry.params / params)), entry.setup
    if entry.how not in found or off < found[entry.how][0]:
      found[entry.how] = off, entry
  return tuple(found[how][1] for how in WAYS if how in found)


def in_words(pause_s: float) -> str:
  """Says a pause, and where it is from."""
  if pause_s == FITTED_S:
    return f"the paper's fitted {pause_s:g} s"
  for entry in measured():
    if pause_s == entry.pause_s:
      return f'{pause_s:g} s ({entry})'
  return f'{pause_s:g} s (as given)'


def _parse(text: str) -> tuple[MeasuredPause, ...]:
  entries = json.loads(text)
  if not isinstance(entries, list):
    raise ValueError('must be a list of entries')
  names = [field.name for field in dataclasses.fields(MeasuredPause)]
  found = []
  for i, entry in enumerate(entries):
    if not isinstance(entry, dict) or entry.keys() != set(names):
      raise ValueError(f'entry {i}: must have {", ".join(names)}')
    try:
      found.append(MeasuredPause(**entry))
    except ValueError as error:
      raise ValueError(f'entry {i}: {error}') from None
  return tuple(found)
