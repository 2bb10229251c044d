# SPDX-License-Identifier: Apache-2.0
"""What comes of a run of the lab."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from diloco.metrics.token_ledger import Row
from diloco.sim.tally import Tally


@dataclasses.dataclass(frozen=True)
class Point:
  """Where a run stood.

  Attributes:
    step: t, the global step; of data-parallel, steps of so many tokens as all
      learners have.
    tokens: trained by all learners.
    loss: of the global model on held-out text, nats per token.
    learners_loss: of the mean of the learners' parameters, likewise; NaN where
      there is none.
    at_s: simulated.
    health: of a mixture of experts, by name; see `diloco.lab.health`.
  """

  step: int
  tokens: int
  loss: float
  learners_loss: float
  at_s: float
  health: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Trained:
  """What came of a run."""

  points: tuple[Point, ...]  # The last one is the end.
  steps: int  # Inner steps of all learners.
  rounds: int
  participation: float  # Mean share of the learners that a round merged.
  goodput: float  # Share of the learners' time that went into steps.
  parameters: dict[str, np.ndarray]
  tally: Tally  # What a timeline shows, as far as it was asked for.
  deaths: tuple[tuple[int, float, float], ...] = ()  # Learner, dies, is back.
  merged_tokens: int = 0  # That Θ has taken in: trained, and not lost since.
  tokens: Row | None = None  # Sum over learners and fragments.
  unexplained_tokens: int | None = None  # See `metrics.token_ledger`.
  # Of what was merged, see `metrics.ages`; None where nothing is.
  age_steps: float | None = None
  old_share: float | None = None

  @property
  def loss(self) -> float:
    """At the end."""
    return self.points[-1].loss
