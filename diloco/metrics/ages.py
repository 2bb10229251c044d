# SPDX-License-Identifier: Apache-2.0
"""The age of merged contributions, in inner steps of their learner.

An offer ages from its arrival until its round is merged: the learner goes on,
and what it has made since is not included. Participation does not show that.
"""

import dataclasses
from collections.abc import Iterable

OLD_STEPS = 1.5  # A contribution older than this counts as old.


@dataclasses.dataclass
class ContributionAges:
  """Statistics of the ages of merged contributions."""

  count: int = 0  # Number of contributions.
  total_steps: float = 0.0  # Σ of their ages.
  old: int = 0  # Number of contributions older than `OLD_STEPS`.

  def add(self, age_steps: float):
    """Counts one contribution."""
    self.count += 1
    self.total_steps += age_steps
    self.old += age_steps > OLD_STEPS

  @property
  def mean_steps(self) -> float | None:
    """Mean age; None if nothing was merged."""
    return self.total_steps / self.count if self.count else None

  @property
  def old_share(self) -> float | None:
    """Share of old contributions; None if nothing was merged."""
    return self.old / self.count if self.count else None


def total(statistics: Iterable[ContributionAges]) -> ContributionAges:
  """Returns the sum of several statistics."""
  result = ContributionAges()
  for ages in statistics:
    result.count += ages.count
    result.total_steps += ages.total_steps
    result.old += ages.old
  return result
