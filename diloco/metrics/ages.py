# SPDX-License-Identifier: Apache-2.0
"""How old what is merged is, in inner steps of the learner that made it.

An offer ages from its arrival until its round is merged: the learner goes on,
and what it has made since is not in it. Participation does not show that.
"""

import dataclasses
from collections.abc import Iterable

OLD_STEPS = 1.5  # Beyond this a contribution counts as old.


@dataclasses.dataclass
class Ages:
  """Of merged contributions, counted one by one.

  Attributes:
    count: of contributions.
    total_steps: Σ of their ages.
    old: how many of them are older than `OLD_STEPS`.
  """

  count: int = 0
  total_steps: float = 0.0
  old: int = 0

  def add(self, age_steps: float):
    """Counts one."""
    self.count += 1
    self.total_steps += age_steps
    self.old += age_steps > OLD_STEPS

  @property
  def mean_steps(self) -> float | None:
    """None where nothing was merged."""
    return self.total_steps / self.count if self.count else None

  @property
  def old_share(self) -> float | None:
    """Of the contributions; None where nothing was merged."""
    return self.old / self.count if self.count else None


def total(each: Iterable[Ages]) -> Ages:
  """All of them together."""
  found = Ages()
  for ages in each:
    found.count += ages.count
    found.total_steps += ages.total_steps
    found.old += ages.old
  return found


def text(mean_steps: float | None, old_share: float | None) -> str:
  """Both numbers as a table shows them."""
  if mean_steps is None or old_share is None:
    return 'nothing was merged'
  return f'{mean_steps:.2f} steps, {old_share:.0%} older than {OLD_STEPS}'
