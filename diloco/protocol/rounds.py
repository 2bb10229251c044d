# SPDX-License-Identifier: Apache-2.0
"""A round from due to closed, and the decisions on the way as leaf functions.

A decision returns its reason; the machine changes state, the leaf does not.
"""

import dataclasses
import enum
import typing
from collections.abc import Mapping

from diloco.protocol import messages
from diloco.protocol.config import ProtocolConfig


class Stage(enum.Enum):
  """Where an open round stands."""

  COLLECTING = 'collecting'  # Due; fewer than K offers.
  GRACE = 'grace'  # Quorum reached; more learners may come.
  PULLING = 'pulling'  # The window ended; bytes are under way.
  MERGING = 'merging'  # Given to the outer optimizer.


@dataclasses.dataclass(frozen=True)
class HeldOffer:
  """An offer that waits at the syncer for its round."""

  offer: messages.Offer
  arrived_s: float


@dataclasses.dataclass(frozen=True)
class Admitted:
  """An offer that a round pulls, of one incarnation."""

  incarnation: int
  held: HeldOffer
  step_s: float = 0.0  # ξ_step of the learner when its pull began; 0: unknown.

  def age_s(self, at_s: float) -> float:
    """How long the offer had waited by then; 0: it came later."""
    return max(0.0, at_s - self.held.arrived_s)

  def age_steps(self, at_s: float) -> float:
    """The same in the learner's steps; 0 where their length is unknown."""
    return self.age_s(at_s) / self.step_s if self.step_s else 0.0


@dataclasses.dataclass(frozen=True)
class Round:
  """One open round. Times are those of the driver, in seconds."""

  number: int
  fragment: int
  due_s: float
  stage: Stage = Stage.COLLECTING
  quorum_at_s: float | None = None
  closes_at_s: float | None = None
  pull_began_s: float | None = None
  pulls: tuple[tuple[int, Admitted], ...] = ()  # Ascending learner id.
  pulled: frozenset[int] = frozenset()  # Of `pulls`: the bytes are here.
  norms: tuple[tuple[int, float], ...] = ()  # Of those not judged yet.
  waited: bool = False  # In vain, for bytes that were given up.
  held_s: float | None = None  # Since when it waits for slow ones only.
  reason: str = ''  # Why the window ended.

  def all_pulled(self) -> bool:
    return all(m in self.pulled for m, _ in self.pulls)

  def without(self, learner: int) -> dict:
    """The fields that change when a learner drops out of the pulls."""
    return {
      'pulls': tuple((m, a) for m, a in self.pulls if m != learner),
      'pulled': self.pulled - {learner},
      'norms': tuple((m, n) for m, n in self.norms if m != learner),
    }


class MergedSteps(typing.NamedTuple):
  """Which of a learner's steps on a fragment a round has merged."""

  base: int = -1  # Of the last offer; an older session's may count, too.
  step: int | None = None  # Up to this own step; of the session's offers.

  def has(self, offer: messages.Offer) -> bool:
    """Whether steps of the offer are among them.

    Not the base alone says so: who goes on with its steps on a newer base,
    because nothing of them was merged, may have its older offer merged yet.
    """
    if offer.base_version <= self.base:
      return True
    return self.step is not None and offer.step - offer.c_steps < self.step


class Candidate(typing.NamedTuple):
  """What a round looks at in one learner."""

  clock: int | None  # None: it leaves, and is not waited for.
  held: HeldOffer | None  # Its newest offer for the round's fragment.
  merged: MergedSteps


def why_void(
  offer: messages.Offer,
  merged: MergedSteps,
  version: int,
  config: ProtocolConfig,
) -> str | None:
  """Why an offer can never be merged any more; None where it can.

  Args:
    offer: of some learner.
    merged: what has been, of its steps on the fragment.
    version: of the fragment at the syncer.
    config: of the run.
  """
  if merged.has(offer):
    return f'merged already from base {offer.base_version}'
  if version - offer.base_version > config.max_staleness_versions:
    return f'stale, base {offer.base_version} and now {version}'
  return None


def why_not(
  candidate: Candidate, due_step: int, version: int, config: ProtocolConfig
) -> str | None:
  """Why a candidate's offer can't be merged now; None where it can."""
  if candidate.held is None:
    return 'no offer'
  offer = candidate.held.offer
  if offer.c_steps < 1:
    return 'no step since its base'
  behind = candidate.clock is not None and candidate.clock < due_step
  if config.admission == 'fresh' and behind:
    return f'clock {candidate.clock} before step {due_step}'
  return why_void(offer, candidate.merged, version, config)


@dataclasses.dataclass(frozen=True)
class Decision:
  """Whom a round can merge now, and whether they are enough."""

  reached: bool
  admitted: tuple[int, ...]  # Ascending learner id.
  complete: bool  # Nobody is left to wait for.
  reason: str


def decide(
  round_: int,
  candidates: Mapping[int, Candidate],
  version: int,
  config: ProtocolConfig,
  quorum: int,
  last: bool = False,
) -> Decision:
  """Quorum of a due round: K admissible offers, K ≤ live learners.

  Args:
    round_: its number.
    candidates: the live learners, and those that leave, by id.
    version: of the round's fragment, before the round.
    config: of the run.
    quorum: K now.
    last: the run is finishing, nobody makes another step: clocks don't count.
  """
  due_step = 0 if last else round_ * config.spacing_steps
  blocked = {
    m: why_not(c, due_step, version, config) for m, c in candidates.items()
  }
  admitted = tuple(m for m in sorted(blocked) if blocked[m] is None)
  live = [c for c in candidates.values() if c.clock is not None]
  # Steps are reported before a snapshot is encoded: a clock alone would end
  # the window on the very offers that it is held open for.
  # Where each step has a round (s = 1), the next offer is of another fragment:
  # of a learner whose clock is behind, there is nothing newer to wait for.
  newest = config.spacing_steps == 1 and config.admission == 'latest'
  complete = all(
    (newest or c.clock >= due_step)
    and c.held is not None
    and c.held.offer.round >= round_
    for c in live
  )
  if not candidates:
    return Decision(False, (), False, 'no live learner')
  # Who leaves is taken along; the round is not closed for it alone.
  enough = [m for m in admitted if candidates[m].clock is not None or not live]
  reason = f'{len(enough)}/{quorum} offers, {len(live)} live'
  return Decision(len(enough) >= quorum, admitted, complete, reason)
