# SPDX-License-Identifier: Apache-2.0
"""A round from due to closed, with its decisions as leaf functions.

A decision returns its reason; the machine changes state, the leaf does not.
"""

import bisect
import dataclasses
import enum
import typing

from diloco.protocol import messages, timeouts
from diloco.protocol.config import ADMISSIONS, ProtocolConfig
from diloco.protocol.timeouts import TransferTime


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
  # Derived while it collects, and while it pulls (`SyncerState.settle`).
  candidates: 'Candidates | None' = dataclasses.field(
    default=None, repr=False, compare=False
  )
  waits: 'Waits | None' = dataclasses.field(
    default=None, repr=False, compare=False
  )

  def all_pulled(self) -> bool:
    return len(self.pulled) == len(self.pulls)

  def missing(self) -> list[int]:
    """Returns the learners whose bytes are not here yet, in ascending id."""
    return [m for m in self.pulls if m not in self.pulled]

  def is_pulling(self, learner: int, held: HeldOffer) -> bool:
    """Returns True if the bytes of this very offer are being pulled."""
    admitted = self.pulls.get(learner)
    return (
      admitted is not None
      and admitted.held is held
      and learner not in self.pulled
    )

  def drop(self, learner: int):
    """Takes a learner out of the pulls, if it is among them."""
    self.pulls.pop(learner, None)
    self.pulled.discard(learner)
    self.norms.pop(learner, None)

  def copy(self) -> 'Round':
    """Returns a copy that later changes do not affect."""
    return dataclasses.replace(
      self,
      pulls=dict(self.pulls),
      pulled=set(self.pulled),
      norms=dict(self.norms),
      candidates=None,
      waits=None,
    )


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
  """Says if the learners that a round can merge now suffice."""

  reached: bool
  complete: bool  # There is no other learner to wait for.
  reason: str


class Candidates:
  """Counts the candidates of a due round as they change.

  Args:
    round_: the round's number.
    version: the version of the fragment before the round.
    last: True if the run is finishing: no more steps are made, so clocks do not
      count.

  Attributes:
    admitted: the learners whose offers can be merged now.
  """

  def __init__(
    self, round_: int, version: int, config: ProtocolConfig, last: bool = False
  ):
    self.version, self.last = version, last
    self.admitted: set[int] = set()
    self._round = round_
    self._config = config
    self._due_step = 0 if last else round_ * config.spacing_steps
    # If each step has a round (s = 1), the next offer is of another fragment: a
    # learner whose clock is behind has nothing newer to wait for.
    waits_for_clock = ADMISSIONS[config.admission].waits_for_clock
    self._newest = config.spacing_steps == 1 and not waits_for_clock
    self._all: set[int] = set()
    self._live: set[int] = set()  # All but those that are leaving.
    self._live_admitted: set[int] = set()
    self._awaited: set[int] = set()  # Live ones that hold the window open.

  def put(self, learner: int, candidate: Candidate | None):
    """Counts a learner as it is now; None: it is no candidate."""
    for each in (
      self._all,
      self._live,
      self.admitted,
      self._live_admitted,
      self._awaited,
    ):
      each.discard(learner)
    if candidate is None:
      return
    self._all.add(learner)
    blocked = why_not(candidate, self._due_step, self.version, self._config)
    if blocked is None:
      self.admitted.add(learner)
    if candidate.clock is None:
      return
    self._live.add(learner)
    if blocked is None:
      self._live_admitted.add(learner)
    # Steps are reported before a snapshot is encoded: a clock alone would end
    # the window on the very offers that it is held open for.
    made = self._newest or candidate.clock >= self._due_step
    offered = candidate.held is not None and (
      candidate.held.offer.round >= self._round
    )
    if not (made and offered):
      self._awaited.add(learner)

  def decide(self, quorum: int) -> MergeDecision:
    """Decides on the quorum: K admissible offers, K ≤ live learners.

    Args:
      quorum: K as it is now.
    """
    if not self._all:
      return MergeDecision(False, False, 'no live learner')
    # A leaving learner is included, but the round does not close for it alone.
    enough = len(self._live_admitted if self._live else self.admitted)
    reason = f'{enough}/{quorum} offers, {len(self._live)} live'
    return MergeDecision(enough >= quorum, not self._awaited, reason)


class AwaitedPull(typing.NamedTuple):
  """The facts about one contribution on which a pulling round decides."""

  usual_s: float | None  # Its bytes usually take so long; None: unknown.
  failed: bool  # The last pull from its learner failed.
  late_at_s: float | None  # When it is given up; None: its bytes are here.


class Waits:
  """Keeps what a pulling round waits for sorted as it changes.

  With a quorum it does not wait for a learner whose last pull failed, which
  gets only as long as the others take. For a learner far slower than the rest
  it waits only if that holds up no other round, or if slow ones have not done
  so for a while.
  """

  def __init__(self):
    self._pulls: dict[int, AwaitedPull] = {}
    self._usual_s: list[float] = []  # Ascending, like the two below.
    self._late_at_s: list[tuple[float, int]] = []
    self._hoped_s: list[float] = []  # Usual times of those worth a wait.

  def put(self, learner: int, pull: AwaitedPull | None):
    """Notes a contribution as it is now; None: it is none of the round."""
    before = self._pulls.pop(learner, None)
    if before is not None:
      for times, value in self._places(learner, before):
        del times[bisect.bisect_left(times, value)]
    if pull is not None:
      self._pulls[learner] = pull
      for times, value in self._places(learner, pull):
        bisect.insort(times, value)

  def _places(self, learner: int, pull: AwaitedPull):
    """Yields the lists that a pull is in, each with its value there."""
    if pull.usual_s is not None:
      yield self._usual_s, pull.usual_s
    if pull.late_at_s is not None:
      yield self._late_at_s, (pull.late_at_s, learner)
      if not pull.failed:
        usual_s = float('-inf') if pull.usual_s is None else pull.usual_s
        yield self._hoped_s, usual_s

  @property
  def late_at_s(self) -> float | None:
    """Returns when the next pull is given up; None if there is none."""
    return self._late_at_s[0][0] if self._late_at_s else None

  def late(self, now: float) -> list[int]:
    """Returns the learners whose pulls have taken too long, in ascending id."""
    end = bisect.bisect_right(self._late_at_s, (now, float('inf')))
    return sorted(m for _, m in self._late_at_s[:end])

  def go_on(self, may_hold: bool) -> bool:
    """Returns True if a round with a quorum still waits for bytes.

    Args:
      may_hold: True if it may wait for slow learners.
    """
    if may_hold or not self._hoped_s:
      return bool(self._hoped_s)
    known = len(self._usual_s)
    median_s = self._usual_s[(known - 1) // 2] if known else 0.0
    return self._hoped_s[0] <= timeouts.SLOW_FACTOR * median_s


def awaited_pull(
  time: TransferTime, nbytes: int, began_s: float | None, patience: float
) -> AwaitedPull:
  """Returns what a round knows of a contribution.

  Args:
    time: its learner's transfer time.
    began_s: when the pull began; None: its bytes are here.
  """
  late_at_s = None
  if began_s is not None:
    late_at_s = began_s + timeouts.pull_max_s(time, nbytes, patience)
  return AwaitedPull(time.usual_s(nbytes), time.failed, late_at_s)
