# SPDX-License-Identifier: Apache-2.0
"""The syncer's state, shared by its sessions and rounds."""

import dataclasses
from collections.abc import Mapping

from diloco.protocol import messages
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.grace import Ema
from diloco.protocol.pace import PaceClock
from diloco.protocol.round_policy import RoundPolicy
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer.members import LearnerAccount, Member, Members
from diloco.protocol.syncer.rounds import Round
from diloco.protocol.timeouts import TransferTime
from diloco.protocol.values import changed


@dataclasses.dataclass(frozen=True)
class LostFragment:
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


@dataclasses.dataclass(frozen=True)
class Away:
  """A fragment whose shard is away."""

  wanted_by: tuple[int, ...] = ()  # Learners that wait for it, in ascending id.
  # True if `crc` is that of the run's version, as learners or the ledger told
  # it (None: unknown); what the shard has may be of an older history.
  adopted: bool = False
  crc: int | None = None


@dataclasses.dataclass(frozen=True)
class SyncerSnapshot:
  """All that the machine knows, as a value to compare, save and restore."""

  now: float
  step: int
  clocks: tuple[tuple[int, int], ...]
  closed_round: int
  versions: tuple[int, ...]
  members: tuple[tuple[int, Member], ...]
  accounts: tuple[tuple[int, LearnerAccount], ...]
  open_rounds: tuple[Round, ...]
  quorum_s: Ema
  sync_s: Ema
  transfers: tuple[tuple[int, TransferTime], ...]
  resting: tuple[tuple[int, float], ...]
  hold_again_s: float
  usual_norms: tuple[float | None, ...]
  left_clocks: tuple[tuple[int, int], ...]
  lost: tuple[tuple[int, LostFragment], ...]
  away: tuple[tuple[int, Away], ...]
  awaits_shards: bool
  give_up_shards_s: float | None
  give_up_lost_s: float | None
  knows_less: bool
  told_until_round: int | None
  were_live: frozenset[int]
  last_round: int | None
  finish_at_s: float | None
  finish_was_told: bool
  ended: bool


@dataclasses.dataclass(frozen=True)
class Ledger:
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
    # If sharded (`absence.py`): the fragments whose shard is away, and whether
    # this process has yet to see all of its shards.
    self.away: dict[int, Away] = {}
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
    return SyncerSnapshot(**self._values(SyncerSnapshot))

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
    names = [field.name for field in dataclasses.fields(cls)]
    return {
      name: derived[name] if name in derived else _frozen(getattr(self, name))
      for name in names
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
    return PaceClock(
      config.spacing_steps,
      config.clock_ahead_max,
      step,
      clocks,
      first=self._first(),
      moved=self.touched,
    )

  def _first(self) -> int:
    """Returns how many learners the run needs to start.

    τ = 0 is synchronous: a learner that compiles first would otherwise close
    rounds alone, and no two runs would be alike. Later K is at most the number
    of live learners.
    """
    return 1 if self.config.overlap_steps else self.config.quorum

  # Changes ------------------------------------------------------------------

  def change(self, learner: int, **fields):
    self.members[learner] = changed(self.members[learner], **fields)

  def retire(self, learner: int, handle: int, pulled: bool = False):
    """Tells a learner that it may release one of its offers.

    Args:
      handle: the offer's handle.
      pulled: True if a round has its bytes and may merge them.
    """
    self.send(learner, messages.Retired((handle,), pulled))

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
