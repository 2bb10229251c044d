# SPDX-License-Identifier: Apache-2.0
"""A round from due to closed, with its decisions as leaf functions.

A decision returns its reason; the machine changes state, the leaf does not.
"""

import dataclasses
import enum
import typing
from collections.abc import Mapping

from diloco.protocol import messages
from diloco.protocol.config import ADMISSIONS, ProtocolConfig


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

  def age_s(self, at_s: float) -> float:
    """Returns how long the offer had waited, s; 0 if it came later."""
    return max(0.0, at_s - self.held.arrived_s)

  def age_steps(self, at_s: float) -> float:
    """Returns the offer's age in the learner's steps; 0 if unknown."""
    return self.age_s(at_s) / self.step_s if self.step_s else 0.0


@dataclasses.dataclass(frozen=True)
class Round:
  """One open round; times are the driver's, in seconds."""

  number: int
  fragment: int
  due_s: float
  stage: Stage = Stage.COLLECTING
  quorum_at_s: float | None = None
  closes_at_s: float | None = None
  pull_began_s: float | None = None
  pulls: tuple[tuple[int, AdmittedOffer], ...] = ()  # Ascending learner id.
  # Learners of `pulls` whose bytes are here.
  pulled: frozenset[int] = frozenset()
  # Norms that are not judged yet, by learner.
  norms: tuple[tuple[int, float], ...] = ()
  waited: bool = False  # It waited in vain for bytes that were given up.
  held_s: float | None = None  # Since when it waits only for slow learners.
  reason: str = ''  # Why the window ended.

  def all_pulled(self) -> bool:
    return all(m in self.pulled for m, _ in self.pulls)

  def without(self, learner: int) -> dict:
    """Returns the fields that change when a learner drops out of the pulls."""
    return {
      'pulls': tuple((m, a) for m, a in self.pulls if m != learner),
      'pulled': self.pulled - {learner},
      'norms': tuple((m, n) for m, n in self.norms if m != learner),
    }


class MergedSteps(typing.NamedTuple):
  """The steps of a learner on a fragment that rounds have merged."""

  # Base of the last merged offer, which may be of an older session.
  base: int = -1
  # Merged up to this own step; of this session's offers.
  step: int | None = None

  def has(self, offer: messages.Offer) -> bool:
    """Returns True if steps of the offer are among them.

    The base alone does not decide it: a learner that carries its steps over to
    a newer base, because none of them was merged, may have its older offer
    merged yet.
    """
    if offer.base_version <= self.base:
      return True
    return self.step is not None and offer.step - offer.c_steps < self.step


class Candidate(typing.NamedTuple):
  """The facts about one learner on which a round decides."""

  clock: int | None  # None: it is leaving, and is not waited for.
  held: HeldOffer | None  # Its newest offer for the round's fragment.
  merged: MergedSteps


def why_void(
  offer: messages.Offer,
  merged: MergedSteps,
  version: int,
  config: ProtocolConfig,
) -> str | None:
  """Returns why an offer can never be merged any more; None if it can.

  Args:
    offer: the offer of a learner.
    merged: that learner's merged steps on the fragment.
    version: the fragment's version at the syncer.
  """
  if merged.has(offer):
    return f'merged already from base {offer.base_version}'
  if version - offer.base_version > config.max_staleness_versions:
    return f'stale, base {offer.base_version} and now {version}'
  return None


def why_not(
  candidate: Candidate, due_step: int, version: int, config: ProtocolConfig
) -> str | None:
  """Returns why a candidate's offer can't be merged now; None if it can."""
  if candidate.held is None:
    return 'no offer'
  offer = candidate.held.offer
  if offer.c_steps < 1:
    return 'no step since its base'
  behind = candidate.clock is not None and candidate.clock < due_step
  if ADMISSIONS[config.admission].waits_for_clock and behind:
    return f'clock {candidate.clock} before step {due_step}'
  return why_void(offer, candidate.merged, version, config)


@dataclasses.dataclass(frozen=True)
class MergeDecision:
  """The learners that a round can merge now, and whether they suffice."""

  reached: bool
  admitted: tuple[int, ...]  # Ascending learner id.
  complete: bool  # There is no other learner to wait for.
  reason: str


def decide(
  round_: int,
  candidates: Mapping[int, Candidate],
  version: int,
  config: ProtocolConfig,
  quorum: int,
  last: bool = False,
) -> MergeDecision:
  """Decides on the quorum of a due round: K admissible offers, K ≤ live
  learners.

  Args:
    round_: the round's number.
    candidates: the live and the leaving learners, by id.
    version: the version of the fragment before the round.
    quorum: K as it is now.
    last: True if the run is finishing: no more steps are made, so clocks do not
      count.
  """
  due_step = 0 if last else round_ * config.spacing_steps
  blocked = {
    m: why_not(c, due_step, version, config) for m, c in candidates.items()
  }
  admitted = tuple(m for m in sorted(blocked) if blocked[m] is None)
  live = [c for c in candidates.values() if c.clock is not None]
  # Steps are reported before a snapshot is encoded: a clock alone would end
  # the window on the very offers that it is held open for.
  # If each step has a round (s = 1), the next offer is of another fragment: a
  # learner whose clock is behind has nothing newer to wait for.
  waits_for_clock = ADMISSIONS[config.admission].waits_for_clock
  newest = config.spacing_steps == 1 and not waits_for_clock
  complete = all(
    (newest or c.clock >= due_step)
    and c.held is not None
    and c.held.offer.round >= round_
    for c in live
  )
  if not candidates:
    return MergeDecision(False, (), False, 'no live learner')
  # A leaving learner is included, but the round does not close for it alone.
  enough = [m for m in admitted if candidates[m].clock is not None or not live]
  reason = f'{len(enough)}/{quorum} offers, {len(live)} live'
  return MergeDecision(len(enough) >= quorum, admitted, complete, reason)
