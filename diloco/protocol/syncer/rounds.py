# SPDX-License-Identifier: Apache-2.0
"""An open round: its stages, and the offers that it pulls.

`collecting` decides what it pulls, `pulls` gets the bytes, `closing` merges.
"""

import dataclasses
import enum

from diloco.protocol import messages


class Stage(enum.Enum):
  """The stages of an open round."""

  COLLECTING = 'collecting'  # Due; fewer than K offers.
  GRACE = 'grace'  # Quorum reached; more learners may come.
  PULLING = 'pulling'  # The window ended; bytes are being pulled.
  MERGING = 'merging'  # Given to the outer optimizer.


@dataclasses.dataclass(frozen=True)
class HeldOffer:
  """An offer that waits at the syncer for its round."""

  offer: messages.Offer
  arrived_s: float


@dataclasses.dataclass(frozen=True)
class AdmittedOffer:
  """An offer that a round pulls, of one incarnation."""

  incarnation: int
  held: HeldOffer
  step_s: float = 0.0  # ξ_step of the learner when its pull began; 0: unknown.


@dataclasses.dataclass
class Round:
  """One open round, changed in place; times are the driver's, in seconds."""

  number: int
  fragment: int
  due_s: float
  stage: Stage = Stage.COLLECTING
  quorum_at_s: float | None = None
  closes_at_s: float | None = None
  pull_began_s: float | None = None
  # By learner, in ascending id.
  pulls: dict[int, AdmittedOffer] = dataclasses.field(default_factory=dict)
  # Learners of `pulls` whose bytes are here.
  pulled: set[int] = dataclasses.field(default_factory=set)
  # Norms that are not judged yet, by learner.
  norms: dict[int, float] = dataclasses.field(default_factory=dict)
  waited: bool = False  # It waited in vain for bytes that were given up.
  held_s: float | None = None  # Since when it waits only for slow learners.
  reason: str = ''  # Why the window ended.
  # What it knows of each learner while it collects (`collecting.Candidates`)
  # and while it pulls (`pulls.Waits`), and the learners that have changed since
  # it looked.
  candidates: object = dataclasses.field(
    default=None, repr=False, compare=False
  )
  waits: object = dataclasses.field(default=None, repr=False, compare=False)
  touched: set[int] = dataclasses.field(
    default_factory=set, repr=False, compare=False
  )

  def copy(self) -> 'Round':
    """Returns a copy that later changes do not affect."""
    return dataclasses.replace(
      self,
      pulls=dict(self.pulls),
      pulled=set(self.pulled),
      norms=dict(self.norms),
      candidates=None,
      waits=None,
      touched=set(),
    )
