# SPDX-License-Identifier: Apache-2.0
"""The syncer's knowledge of a learner's session, and of its id."""

import dataclasses
import heapq
import math
from collections.abc import Mapping

from diloco.protocol import messages
from diloco.protocol.grace import Ema
from diloco.protocol.syncer.rounds import HeldOffer
from diloco.protocol.values import changed


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

  def with_offer(self, held: HeldOffer) -> 'Member':
    """Keeps the newest offer per fragment: at most P of them."""
    offers = {**self.offers, held.offer.fragment: held}
    return changed(self, offers=offers)

  def with_merged(self, fragment: int, step: int) -> 'Member':
    """Returns a copy with own steps up to `step` merged."""
    return changed(self, merged_steps={**self.merged_steps, fragment: step})

  def without_offer(self, fragment: int) -> 'Member':
    offers = {p: held for p, held in self.offers.items() if p != fragment}
    return changed(self, offers=offers)


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


# A peer may have written it; it goes on the event tape.
REASON_CHARS_MAX = 1000
STEP_JUMP_MAX = 4.0  # One slow step changes ξ_step by no more than this factor.
STEP_S_MAX = 3600.0  # Longer first steps are not believed.


def brief(text: str) -> str:
  """Returns the text, cut to a length fit to send and log."""
  if len(text) <= REASON_CHARS_MAX:
    return text
  return text[: REASON_CHARS_MAX - 1] + '…'


def believable(step_s: float, average: Ema) -> float:
  """Returns a reported step time, bounded to protect the time-outs."""
  if average.value_s is None:
    return min(step_s, STEP_S_MAX)
  return min(step_s, STEP_JUMP_MAX * max(average.value_s, 1e-3))


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

  def merged(
    self,
    fragment: int,
    base_version: int,
    tokens: int,
    offer: tuple[int, int],
  ) -> 'LearnerAccount':
    """Returns the account after merging `offer`: incarnation, handle."""
    return changed(
      self,
      merged_bases={**self.merged_bases, fragment: base_version},
      merged_offers={**self.merged_offers, fragment: offer},
      merged_tokens=self.merged_tokens + tokens,
      strikes=0,
    )


def why_refused(
  hello: messages.Hello,
  account: LearnerAccount,
  run: str,
  fingerprints: Mapping[str, str],
  versions: tuple[int, ...],
  knows_less: bool,
) -> str | None:
  """Returns why a `Hello` is not accepted; None if it is.

  Args:
    account: what the syncer knows of that learner id.
    run: name of the syncer's run.
    fingerprints: hashes of that run's config, layout and data.
    versions: the syncer's version of each fragment.
    knows_less: True if this process has merged nothing yet; a learner may then
      know of later rounds than its ledger.
  """
  if hello.protocol != messages.PROTOCOL_VERSION:
    return (
      f'protocol {hello.protocol}, this syncer speaks '
      f'{messages.PROTOCOL_VERSION}'
    )
  if hello.run != run:
    return f'run {hello.run!r}, this syncer serves {run!r}'
  if hello.learner < 0:
    return f'learner id {hello.learner}, must be at least 0'
  differing = sorted(
    key
    for key in {*fingerprints, *hello.fingerprints}
    if fingerprints.get(key) != hello.fingerprints.get(key)
  )
  if differing:
    return '; '.join(
      f'another {key}: {hello.fingerprints.get(key)}, the run has '
      f'{fingerprints.get(key)}'
      for key in differing
    )
  if not len(hello.versions) == len(hello.crcs) == len(versions):
    return (
      f'{len(hello.versions)} versions and {len(hello.crcs)} CRCs of '
      f'fragments, the run has {len(versions)}'
    )
  if min(hello.versions) < 0:
    return f'version {min(hello.versions)} of a fragment'
  ahead = [p for p, v in enumerate(hello.versions) if v > versions[p]]
  if ahead and not knows_less:
    p = ahead[0]
    return (
      f'version {hello.versions[p]} of fragment {p}, this syncer has only '
      f'{versions[p]} and has merged rounds itself: another run'
    )
  return None


def why_not_now(hello: messages.Hello, account: LearnerAccount) -> str | None:
  """Returns why an incarnation is refused, if a later one would be welcome."""
  if account.quarantined and hello.began:
    return f'quarantined until a clean bootstrap: {account.quarantined}'
  if hello.incarnation > account.incarnation:
    return None
  return (
    f'incarnation {hello.incarnation} is not newer than '
    f'{account.incarnation}, which took its place'
  )
