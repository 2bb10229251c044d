# SPDX-License-Identifier: Apache-2.0
"""The results of a run of the lab."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from diloco.metrics.token_ledger import Row
from diloco.sim.tally import Tally


@dataclasses.dataclass(frozen=True)
class Point:
  """One evaluation of a run.

  Attributes:
    step: t, the global step; for data-parallel, steps of as many tokens as all
      learners have.
    tokens: tokens trained by all learners.
    loss: loss of the global model on held-out text, nats per token.
    learners_loss: loss of the mean of the learners' parameters, nats per token;
      NaN if there is none.
    at_s: simulated time.
    health: metrics of a mixture of experts, by name; see `diloco.lab.health`.
  """

  step: int
  tokens: int
  loss: float
  learners_loss: float
  at_s: float
  health: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Trained:
  """The result of a run."""

  points: tuple[Point, ...]  # The last one is the end.
  steps: int  # Inner steps of all learners.
  rounds: int
  participation: float  # Mean share of the learners that a round merged.
  goodput: float  # Share of the learners' time that went into steps.
  parameters: dict[str, np.ndarray]
  tally: Tally  # Timeline data, if requested.
  deaths: tuple[tuple[int, float, float], ...] = ()  # (learner, death, return).
  merged_tokens: int = 0  # Included in Θ and not lost since.
  tokens: Row | None = None  # Sum over learners and fragments.
  unexplained_tokens: int | None = None  # See `metrics.token_ledger`.
  # Over what was merged, see `metrics.ages`; None if nothing was.
  age_steps: float | None = None
  old_share: float | None = None

  @property
  def loss(self) -> float:
    """The final loss of the global model."""
    return self.points[-1].loss
