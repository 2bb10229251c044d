# SPDX-License-Identifier: Apache-2.0
"""The syncer's knowledge of a learner's session, and of its id."""

import dataclasses
import heapq
import math
from collections.abc import Mapping

from diloco.protocol.grace import Ema
from diloco.protocol.syncer.rounds import HeldOffer


@dataclasses.dataclass(frozen=True)
class Straggler:
  """A pull that its round stopped waiting for; it goes on to its own limit.

  Its bytes are not merged. Their arrival shows that the learner can be pulled
  from again, and how long that takes.
  """

  round: int
  handle: int
  nbytes: int
  began_s: float


@dataclasses.dataclass(frozen=True)
class Member:
  """A session; it is *live*, and counts, from `Ready` until it leaves."""

  incarnation: int
  heard_s: float
  silent_at_s: float  # When it will be given up, unless it speaks before.
  versions: tuple[int, ...] = ()  # From its hello.
  crcs: tuple[int, ...] = ()
  partition: str = ''  # From its hello; '': it has one host.
  ready: bool = False
  leaving: bool = False
  # The learner asked to donate a state to this one.
  donor: tuple[int, int] | None = None
  state_offered: bool = False  # By that donor, to this one.
  tried: tuple[tuple[int, int], ...] = ()  # Donors that have failed.
  seeks_since_s: float | None = None  # Since when it waits for a donor.
  step: int = 0  # Its own step, as last reported.
  step_s: Ema = dataclasses.field(default=Ema())
  offers: Mapping[int, HeldOffer] = dataclasses.field(default_factory=dict)
  # By fragment, the own step up to which offers of this session were merged.
  merged_steps: Mapping[int, int] = dataclasses.field(default_factory=dict)
  handed_in: int | None = None  # The last round that it was told to hand in.
  failed_pulls: int = 0  # Consecutive failures.
  late: bool = False  # Its bytes are late, and it has sent nothing since.
  straggler: Straggler | None = None  # Nothing else is pulled meanwhile.
  # Updates not reported yet: by fragment, version and time of publication.
  published: Mapping[int, tuple[int, float]] = dataclasses.field(
    default_factory=dict
  )
  way_back_s: Ema = dataclasses.field(default=Ema())  # From merge to its host.
  # Full fragments announced to this session, by fragment.
  full_sent: Mapping[int, int] = dataclasses.field(default_factory=dict)
  # Fragments of which a copy was asked for and has not been offered.
  owes: tuple[int, ...] = ()


class Members(dict[int, Member]):
  """The sessions by learner, in ascending id, with indices of them.

  What is asked of all members at every event is kept up to date as one of them
  changes: through `[]` and `pop` only.

  Args:
    members: the sessions to begin with.
    touched: a set to which every learner is added whose session changes.

  Attributes:
    live: learners that count.
    leaving: learners that make no more steps.
    straggling: learners with a pull that no round waits for.
    seeking: newcomers that wait for a donor.
    handed_in: learners that were told to finish, and have.
  """

  def __init__(self, members: Mapping[int, Member], touched: set[int]):
    super().__init__()
    self.live: set[int] = set()
    self.leaving: set[int] = set()
    self.straggling: set[int] = set()
    self.seeking: set[int] = set()
    self.handed_in: set[int] = set()
    self._touched = touched
    # A heap of (time, learner). Of each learner the earliest entry counts; it
    # may be earlier than the deadline, which rises with every message.
    self._looks: list[tuple[float, int]] = []
    self._look_s: dict[int, float] = {}
    for learner, member in members.items():
      self[learner] = member

  def __setitem__(self, learner: int, member: Member):
    before = self.get(learner)
    highest = next(reversed(self), learner)
    super().__setitem__(learner, member)
    if learner < highest and before is None:
      self._sort()
    self._touched.add(learner)
    self._index(learner, before, member)
    if member.silent_at_s < self._look_s.get(learner, math.inf):
      self._look_s[learner] = member.silent_at_s
      heapq.heappush(self._looks, (member.silent_at_s, learner))

  def pop(self, learner: int) -> Member:
    member = super().pop(learner)
    self._touched.add(learner)
    self._look_s.pop(learner, None)
    for index, _ in self._indices(member):
      index.discard(learner)
    return member

  def silent_at_s(self) -> float:
    """Returns the earliest silence deadline; infinite without members."""
    while self._looks:
      at_s, learner = self._looks[0]
      if self._look_s.get(learner) != at_s:
        heapq.heappop(self._looks)  # It ended, or has an earlier entry.
        continue
      deadline_s = self[learner].silent_at_s
      if deadline_s == at_s:
        return at_s
      self._look_s[learner] = deadline_s
      heapq.heapreplace(self._looks, (deadline_s, learner))
    return math.inf

  def _index(self, learner: int, before: Member | None, member: Member):
    if before is not None and _same_indices(before, member):
      return
    for index, is_in in self._indices(member):
      if is_in:
        index.add(learner)
      else:
        index.discard(learner)

  def _indices(self, member: Member) -> tuple[tuple[set[int], bool], ...]:
    """Returns every index, and whether the member belongs to it."""
    return (
      (self.live, member.ready and not member.leaving),
      (self.leaving, member.leaving),
      (self.straggling, member.straggler is not None),
      (self.seeking, member.seeks_since_s is not None),
      (self.handed_in, member.handed_in is not None),
    )

  def _sort(self):
    """Puts the newest member in its place."""
    members = sorted(self.items())
    self.clear()
    for learner, member in members:
      super().__setitem__(learner, member)


def _same_indices(one: Member, other: Member) -> bool:
  """Returns True if both belong to the same indices of `Members`."""
  return (
    one.ready is other.ready
    and one.leaving is other.leaving
    and one.straggler is other.straggler
    and one.seeks_since_s is other.seeks_since_s
    and one.handed_in is other.handed_in
  )


@dataclasses.dataclass(frozen=True)
class LearnerAccount:
  """The syncer's account of a learner id, which outlives its sessions."""

  incarnation: int = -1  # The newest that was ever accepted.
  position: int = 0  # Next batch of its data shard, as last reported.
  merged_bases: Mapping[int, int] = dataclasses.field(default_factory=dict)
  merged_tokens: int = 0
  strikes: int = 0  # Contributions refused since the last merged one.
  quarantined: str = ''  # Why; '' where it is not.
  # By fragment, incarnation and handle of the last offer that was merged.
  merged_offers: Mapping[int, tuple[int, int]] = dataclasses.field(
    default_factory=dict
  )
