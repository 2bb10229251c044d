# SPDX-License-Identifier: Apache-2.0
"""The faults that are injected into a run: which process is killed, and
when.
"""

import dataclasses
import re
from collections.abc import Sequence

from diloco.config_values import ConfigError

FORM = 'kill learner N at FRACTION, or kill syncer at FRACTION'


@dataclasses.dataclass(frozen=True)
class Kill:
  """SIGKILL for one process once the run has come so far."""

  process: str  # 'syncer', or such as 'learner-0'.
  fraction: float  # Of total_steps.

  @property
  def learner(self) -> int | None:
    """The learner's id; None for the syncer."""
    _, dash, number = self.process.partition('-')
    return int(number) if dash else None

  def is_due(self, step: int, total_steps: int) -> bool:
    return step >= self.fraction * total_steps


def plan(faults: Sequence[str], learners: int) -> tuple[Kill, ...]:
  """The faults in the order in which they are due.

  Raises:
    ConfigError: names each fault that can't be read or can't happen.
  """
  kills, problems = [], []
  for i, text in enumerate(faults):
    try:
      kills.append(_parse(text, learners))
    except ValueError as error:
      problems.append(f'faults[{i}]={text!r}: {error}')
  if problems:
    raise ConfigError(problems)
  return tuple(sorted(kills, key=lambda kill: (kill.fraction, kill.process)))


def _parse(text: str, learners: int) -> Kill:
  match = re.fullmatch(r'kill (syncer|learner (\d+)) at (\d*\.?\d+)', text)
  if not match:
    raise ValueError(f'expected {FORM}')
  fraction = float(match[3])
  if not 0 <= fraction < 1:
    raise ValueError(f'the fraction is {fraction}, must be in [0, 1)')
  if match[2] is None:
    return Kill(match[1], fraction)
  learner = int(match[2])
  if learner >= learners:
    raise ValueError(f'learner {learner} of {learners}, ids start at 0')
  return Kill(f'learner-{learner}', fraction)
