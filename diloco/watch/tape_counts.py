# SPDX-License-Identifier: Apache-2.0
"""Counts what a status would tell, for runs that have none: those of the lab.

The lab writes the tape of a syncer, but has no process of one that would
replace a status once a second.
"""

import collections
import json
import pathlib
from collections.abc import Mapping

from diloco.metrics import ages as metrics_ages
from diloco.metrics.ages import ContributionAges
from diloco.metrics.recorded_run import RecordedRound
from diloco.metrics.status import REFUSALS
from diloco.metrics.workdir import learner_name


class TapeCounts:
  """Counts over the closed rounds of a run."""

  def __init__(self):
    self._last: RecordedRound | None = None
    self._closed = 0
    self._merged: collections.Counter[str] = collections.Counter()
    self._ages: dict[str, ContributionAges] = collections.defaultdict(
      ContributionAges
    )

  def add(self, closed: RecordedRound) -> None:
    """Counts one round."""
    self._last = closed
    self._closed += 1
    for share in closed.shares:
      name = learner_name(share.learner)
      self._merged[name] += 1
      if share.age_steps is not None:
        self._ages[name].add(share.age_steps)

  def of_learner(self, name: str) -> dict[str, float | None]:
    """Returns participation and mean age of one learner."""
    if not self._closed:
      return {}
    return {
      'participation': self._merged[name] / self._closed,
      'age_steps': self._ages[name].mean_steps,
    }

  def as_status(
    self, learners: Mapping[str, float | None], kinds: Mapping[str, int]
  ) -> dict | None:
    """Returns the fields of a status that are known; None before a round.

    Args:
      learners: the last loss of each, by name.
      kinds: lines of the tape, by their kind.
    """
    if self._last is None:
      return None
    ages = metrics_ages.total(self._ages.values())
    return {
      'step': self._last.step,
      'closed_round': self._last.number,
      'grace_s': self._last.grace_s,
      'refused': sum(kinds.get(kind, 0) for kind in REFUSALS),
      'age_steps': ages.mean_steps,
      'old_share': ages.old_share,
      'learners': [
        {'state': 'live', 'loss': loss, **self.of_learner(name)}
        for name, loss in learners.items()
      ],
    }


def goodput_of(result: pathlib.Path) -> float | None:
  """Returns the goodput that the lab leaves at its end; None before.

  Raises:
    ValueError: the file is no result.
  """
  if not result.exists():
    return None
  try:
    return json.loads(result.read_text())['goodput']
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{result}: is no result of a run: {error}') from None
