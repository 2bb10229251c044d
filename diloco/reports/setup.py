# SPDX-License-Identifier: Apache-2.0
"""The few values of a run's config.json that its page needs.

Other keys are ignored, so that runs of older versions of this package, with
other keys, can be read as well.
"""

import dataclasses
import json
import pathlib

KEYS = {
  'name': ('name',),
  'learners': ('protocol', 'learners'),
  'fragments': ('protocol', 'fragments'),
  'total_steps': ('protocol', 'total_steps'),
  'batch': ('data', 'batch'),
  'seq_len': ('data', 'seq_len'),
}


class NoReport(Exception):
  """A folder of which no page can be made; says why."""


@dataclasses.dataclass(frozen=True)
class Setup:
  """The configured values."""

  name: str
  learners: int  # M.
  fragments: int  # P.
  total_steps: int
  batch: int
  seq_len: int

  @property
  def tokens_per_step(self) -> int:
    """Tokens of one learner's inner step."""
    return self.batch * self.seq_len


def read(path: pathlib.Path) -> Setup:
  """Reads an existing config.json.

  Raises:
    NoReport: it is not one of a run.
  """
  try:
    config = json.loads(path.read_text())
  except ValueError as error:
    raise NoReport(f'{path}: is not JSON: {error}') from None
  return Setup(**{name: _value(path, config, name) for name in KEYS})


def _value(path: pathlib.Path, config, name: str):
  kind, value = Setup.__annotations__[name], config
  for key in KEYS[name]:
    value = value.get(key) if isinstance(value, dict) else None
  if type(value) is not kind or (kind is int and value < 1):
    key = '.'.join(KEYS[name])
    raise NoReport(f'{path}: {key}={value!r}, no configuration of a run')
  return value
