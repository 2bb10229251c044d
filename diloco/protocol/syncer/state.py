# SPDX-License-Identifier: Apache-2.0
"""The syncer's state: open rounds, sessions, accounts, and what is not here."""

import dataclasses
import enum
import heapq
import math
from collections.abc import Mapping

from diloco.protocol import messages
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.pace import PaceClock
from diloco.protocol.round_policy import RoundPolicy
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.timeouts import TransferTime
from diloco.protocol.values import (
  Ema,
  Value,
  field_names,
  make_unchecked,
  replace_unchecked,
)

# Rounds ----------------------------------------------------------------------


class Stage(enum.Enum):
  """The stages of an open round."""

  COLLECTING = 'collecting'  # Due; fewer than K offers.
  GRACE = 'grace'  # Quorum reached; more learners may come.
  PULLING = 'pulling'  # The window ended; bytes are being pulled.
  MERGING = 'merging'  # Given to the outer optimizer.


class HeldOffer(Value):
  """An offer that waits at the syncer for its round."""

  offer: messages.Offer
  arrived_s: float


class AdmittedOffer(Value):
  """An offer that a round pulls, of one incarnation."""

  incarnation: int
  held: HeldOffer
  step_s: float = 0.0  # ξ_step of the learner when its pull began; 0: unknown.

  @property
  def handle(self) -> int:
    return self.held.offer.payload.handle

  @property
  def nbytes(self) -> int:
    return self.held.offer.payload.nbytes


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
    return replace_unchecked(
      self,
      pulls=dict(self.pulls),
      pulled=set(self.pulled),
      norms=dict(self.norms),
      candidates=None,
      waits=None,
      touched=set(),
    )


# Sessions --------------------------------------------------------------------


class Straggler(Value):
  """A pull that its round stopped waiting for; it goes on to its own limit.

  Its bytes are not merged. Their arrival shows that the learner can be pulled
  from again, and how long that takes.
  """

  round: int
  handle: int
  nbytes: int
  began_s: float


class Member(Value):
  """A session; it is *live*, and counts, from `Ready` until it leaves."""

  incarnation: int
  heard_s: float
  silent_at_s: float  # When it will be given up, unless it speaks before.
  versions: tuple[int, ...] = ()  # From its hello.
  crcs: tuple[int, ...] = ()
  partition: str = ''  # From its hello; '': it has one host.
  world: messages.World = dataclasses.field(default=messages.World())
  first_step: int = 0  # Own step that it goes on from, and rows taken by then,
  first_rows: int = 0  # as its hello said.
  began: bool = False  # Its process had trained before this session.
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
  stragglers: tuple[Straggler, ...] = ()  # Nothing else is pulled meanwhile.
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
  """

  def __init__(self, members: Mapping[int, Member], touched: set[int]):
    super().__init__()
    self.live: set[int] = set()  # Learners that count.
    self.leaving: set[int] = set()  # They make no more steps.
    self.straggling: set[int] = set()  # With pulls that no round waits for.
    self.seeking: set[int] = set()  # Newcomers that wait for a donor.
    self.handed_in: set[int] = set()  # They were told to finish, and have.
    self._touched = touched
    # A heap of (time, learner). Of each learner the earliest entry counts; it
    # may be earlier than the deadline, which rises with every message.
    self._looks: list[tuple[float, int]] = []
    self._look_s: dict[int, float] = {}
    for learner, member in members.items():
      self[learner] = member

  def __setitem__(self, learner: int, member: Member):
    is_new, highest = learner not in self, next(reversed(self), learner)
    super().__setitem__(learner, member)
    if is_new and learner < highest:
      self._sort()
    self._touched.add(learner)
    self._index(learner, member)
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

  def _index(self, learner: int, member: Member):
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
      (self.straggling, bool(member.stragglers)),
      (self.seeking, member.seeks_since_s is not None),
      (self.handed_in, member.handed_in is not None),
    )

  def _sort(self):
    """Puts the newest member in its place."""
    members = sorted(self.items())
    self.clear()
    for learner, member in members:
      super().__setitem__(learner, member)


class LearnerAccount(Value):
  """The syncer's account of a learner id, which outlives its sessions."""

  incarnation: int = -1  # The newest that was ever accepted.
  rows: int = 0  # Taken of its data shard, as last reported.
  merged_bases: Mapping[int, int] = dataclasses.field(default_factory=dict)
  merged_tokens: int = 0
  strikes: int = 0  # Contributions refused since the last merged one.
  quarantined: str = ''  # Why; '' where it is not.
  # By fragment, incarnation and handle of the last offer that was merged.
  merged_offers: Mapping[int, tuple[int, int]] = dataclasses.field(
    default_factory=dict
  )
  step_rows: int = 0  # Of `rows`, those of its last step, and its tokens.
  step_tokens: int = 0
  slices: int = 0  # That took part when it was last ready; 0: it never was.
  # Rows up to which lost ones have been counted, as slices went on.
  counted_rows: int = 0


# Fragments that are not here -------------------------------------------------


class LostFragment(Value):
  """A fragment of which a restarted syncer has only an older version."""

  version: int  # The version at the last close, which it keeps.
  crc: int | None  # CRC of its bytes then; None: unknown.
  held: int  # The version that is here.
  asked: tuple[int, int] | None = None  # The session asked to donate it.
  offered: messages.FragmentOffered | None = None  # By that session.
  tried: tuple[tuple[int, int], ...] = ()  # Sessions that were asked in vain.
  wanted_by: tuple[int, ...] = ()  # Learners that wait for it, in ascending id.
  # True if its shard is back: no other fragment waits for it, and sessions that
  # went on meanwhile are asked what they have, all at once.
  alone: bool = False
  questioned: tuple[tuple[int, int], ...] = ()  # Sessions that were asked.
  answered: tuple[tuple[int, int], ...] = ()  # Of these, those that answered.


class ShardUnavailable(Value):
  """A fragment whose shard is away."""

  wanted_by: tuple[int, ...] = ()  # Learners that wait for it, in ascending id.
  # True if `crc` is that of the run's version, as learners or the ledger told
  # it (None: unknown); what the shard has may be of an older history.
  adopted: bool = False
  crc: int | None = None


# The whole -------------------------------------------------------------------


class Ledger(Value):
  """The state that outlives the syncer's process.

  Sessions and open rounds are not part of it.
  """

  step: int
  clocks: tuple[tuple[int, int], ...]
  closed_round: int
  versions: tuple[int, ...]
  accounts: tuple[tuple[int, LearnerAccount], ...]
  quorum_s: Ema
  sync_s: Ema
  usual_norms: tuple[float | None, ...]
  last_round: int | None  # Set once the run is finishing.
  ended: bool


class SyncerSnapshot(Ledger):
  """All that the machine knows, as a value to compare, save and restore."""

  now: float
  members: tuple[tuple[int, Member], ...]
  open_rounds: tuple[Round, ...]
  transfers: tuple[tuple[int, TransferTime], ...]
  resting: tuple[tuple[int, float], ...]
  hold_again_s: float
  left_clocks: tuple[tuple[int, int], ...]
  lost: tuple[tuple[int, LostFragment], ...]
  away: tuple[tuple[int, ShardUnavailable], ...]
  awaits_shards: bool
  give_up_shards_s: float | None
  give_up_lost_s: float | None
  knows_less: bool
  told_until_round: int | None
  were_live: frozenset[int]
  finish_at_s: float | None
  finish_was_told: bool


class SyncerState:
  """The machine's mutable state, held by the machine alone."""

  def __init__(
    self, config: ProtocolConfig, run: str, fingerprints: Mapping[str, str]
  ):
    self.config = config
    self.policy = RoundPolicy(config)
    self.run = run
    self.fingerprints = dict(fingerprints)
    self.now = float('-inf')
    # Learners whose facts have changed since open rounds looked (`settle`).
    self.touched: set[int] = set()
    self.pace = self._pace_clock()
    self.closed_round = 0
    self.versions = [0] * config.fragments
    self.members = Members({}, self.touched)
    self.accounts: dict[int, LearnerAccount] = {}
    self.rounds: dict[int, Round] = {}  # Open ones, in ascending number.
    self.quorum_s = Ema()
    self.sync_s = Ema()  # From the first pull to the end of the merge.
    self.transfers: dict[int, TransferTime] = {}  # Pull times, by learner.
    # By learner, the time until which it is not pulled from.
    self.resting: dict[int, float] = {}
    # Time from which a round may again wait for slow learners.
    self.hold_again_s = float('-inf')
    # Usual norm of outer gradients per √step, by fragment (`outliers.py`).
    self.usual_norms: list[float | None] = [None] * config.fragments
    self.left_clocks: dict[int, int] = {}  # Clocks of learners that may return.
    # After a restart (`recovery.py`): the lost fragments, and whether learners
    # may know of later rounds than this process.
    self.lost: dict[int, LostFragment] = {}
    self.give_up_lost_s: float | None = None
    # If sharded (`recovery.py`): the fragments whose shard is away, and whether
    # this process has yet to see all of its shards.
    self.away: dict[int, ShardUnavailable] = {}
    self.awaits_shards = False
    self.give_up_shards_s: float | None = None
    self.were_live: frozenset[int] = frozenset()  # At the ledger's close.
    self.knows_less = True  # Until its own first merge.
    # Learners that were told to finish can fill no later round by themselves.
    self.told_until_round: int | None = None  # None: nothing is merged yet.
    self.last_round: int | None = None  # Set once the run is finishing.
    # Deadline for learners to hand in; None: no live learner could.
    self.finish_at_s: float | None = None
    # The finish was announced by an earlier process.
    self.finish_was_told = False
    self.ended = False
    self.effects: list[syncer_events.Effect] = []

  def snapshot(self) -> SyncerSnapshot:
    return make_unchecked(SyncerSnapshot, self._values(SyncerSnapshot))

  def load(self, snapshot: SyncerSnapshot):
    self._set(snapshot)
    self.pace = self._pace_clock(snapshot.step, dict(snapshot.clocks))
    self.members = Members(dict(snapshot.members), self.touched)
    self.rounds = {r.number: r.copy() for r in snapshot.open_rounds}

  def ledger(self) -> Ledger:
    return Ledger(**self._values(Ledger))

  def resume(self, ledger: Ledger):
    """Continues from another process's ledger; all learners must join again."""
    self._set(ledger)
    self.pace = self._pace_clock(ledger.step)
    self.left_clocks = dict(ledger.clocks)
    self.were_live = frozenset(self.left_clocks)
    self.finish_was_told = ledger.last_round is not None
    self.knows_less = not ledger.ended

  def _values(self, cls: type) -> dict[str, object]:
    """Returns the fields of a snapshot or ledger, as values."""
    derived = {
      'step': self.pace.step,
      'clocks': tuple(self.pace.clocks.items()),
      'members': tuple(self.members.items()),
      'open_rounds': tuple(r.copy() for r in self.rounds.values()),
    }
    return {
      name: derived[name] if name in derived else _frozen(getattr(self, name))
      for name in field_names(cls)
    }

  def _set(self, values: SyncerSnapshot | Ledger):
    """Sets the attributes that have a field of their name, but `members`."""
    for name, value in vars(values).items():
      known = vars(self).get(name)
      if isinstance(known, Members) or name not in vars(self):
        continue
      is_kind = isinstance(known, dict | list)
      setattr(self, name, type(known)(value) if is_kind else value)

  # Questions ----------------------------------------------------------------

  @property
  def finishing(self) -> bool:
    return self.last_round is not None

  def is_current(self, learner: int, incarnation: int) -> bool:
    member = self.members.get(learner)
    return member is not None and member.incarnation == incarnation

  def _pace_clock(
    self, step: int = 0, clocks: Mapping[int, int] | None = None
  ) -> PaceClock:
    config = self.config
    # τ = 0 is synchronous: a learner that compiles first would otherwise close
    # rounds alone, and no two runs would be alike.
    first = 1 if config.overlap_steps else config.quorum
    bounds = config.spacing_steps, config.clock_ahead_max
    return PaceClock(*bounds, step, clocks, first, moved=self.touched)

  # Changes ------------------------------------------------------------------

  def change(self, learner: int, **fields):
    self.members[learner] = replace_unchecked(self.members[learner], **fields)

  def retire(self, learner: int, handle: int, pulled: bool = False):
    """Tells a learner that it may release one of its offers.

    Args:
      pulled: True if a round has its bytes and may merge them.
    """
    self.send(learner, messages.Retired((handle,), pulled))

  def forget_published(self, learner: int, fragment: int):
    """Stops measuring how long an update takes to reach a learner."""
    published = dict(self.members[learner].published)
    if published.pop(fragment, None) is not None:
      self.change(learner, published=published)

  # Effects ------------------------------------------------------------------

  def emit(self, effect: syncer_events.Effect):
    self.effects.append(effect)

  def send(self, learner: int, message):
    incarnation = self.members[learner].incarnation
    self.emit(syncer_events.Send(learner, incarnation, message))

  def record(self, kind: str, learner: int, reason: str):
    self.emit(syncer_events.LogDecision(kind, learner, reason))


def _frozen(value):
  """Returns a dict's items in ascending order, a list as a tuple."""
  if isinstance(value, dict):
    return tuple(sorted(value.items()))
  return tuple(value) if isinstance(value, list) else value
