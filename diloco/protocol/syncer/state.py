# SPDX-License-Identifier: Apache-2.0
"""The syncer's state, shared by its sessions and rounds."""

import dataclasses
from collections.abc import Mapping

from diloco.protocol import messages
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.grace import Ema
from diloco.protocol.pace import PaceClock
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer.members import LearnerAccount, Member
from diloco.protocol.syncer.rounds import (
  HeldOffer,
  MergedSteps,
  Round,
  why_void,
)
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
  # went on meanwhile are asked what they have.
  alone: bool = False
  answered: tuple[tuple[int, int], ...] = ()  # Sessions that have answered.


@dataclasses.dataclass(frozen=True)
class Away:
  """A fragment whose shard is away."""

  wanted_by: tuple[int, ...] = ()  # Learners that wait for it, in ascending id.
  # True if `crc` is that of the run's version, as learners or the ledger told
  # it (None: unknown); what the shard has may be of an older history.
  adopted: bool = False
  crc: int | None = None

  def wanted(self, learner: int) -> 'Away':
    wanted_by = tuple(sorted({*self.wanted_by, learner}))
    return changed(self, wanted_by=wanted_by)

  def without(self, learner: int) -> 'Away':
    wanted_by = tuple(m for m in self.wanted_by if m != learner)
    return changed(self, wanted_by=wanted_by)


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
    self.run = run
    self.fingerprints = dict(fingerprints)
    self.now = float('-inf')
    self.pace = self._pace_clock()
    self.closed_round = 0
    self.versions = [0] * config.fragments
    self.members: dict[int, Member] = {}  # In ascending id.
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
    return SyncerSnapshot(
      now=self.now,
      step=self.pace.step,
      clocks=tuple(self.pace.clocks.items()),
      closed_round=self.closed_round,
      versions=tuple(self.versions),
      members=tuple(sorted(self.members.items())),
      accounts=tuple(sorted(self.accounts.items())),
      open_rounds=tuple(self.rounds.values()),
      quorum_s=self.quorum_s,
      sync_s=self.sync_s,
      transfers=tuple(sorted(self.transfers.items())),
      resting=tuple(sorted(self.resting.items())),
      hold_again_s=self.hold_again_s,
      usual_norms=tuple(self.usual_norms),
      left_clocks=tuple(sorted(self.left_clocks.items())),
      lost=tuple(sorted(self.lost.items())),
      away=tuple(sorted(self.away.items())),
      awaits_shards=self.awaits_shards,
      give_up_shards_s=self.give_up_shards_s,
      give_up_lost_s=self.give_up_lost_s,
      knows_less=self.knows_less,
      told_until_round=self.told_until_round,
      were_live=self.were_live,
      last_round=self.last_round,
      finish_at_s=self.finish_at_s,
      finish_was_told=self.finish_was_told,
      ended=self.ended,
    )

  def load(self, snapshot: SyncerSnapshot):
    self.now = snapshot.now
    self.pace = self._pace_clock(snapshot.step, dict(snapshot.clocks))
    self.closed_round = snapshot.closed_round
    self.versions = list(snapshot.versions)
    self.members = dict(snapshot.members)
    self.accounts = dict(snapshot.accounts)
    self.rounds = {r.number: r for r in snapshot.open_rounds}
    self.quorum_s = snapshot.quorum_s
    self.sync_s = snapshot.sync_s
    self.transfers = dict(snapshot.transfers)
    self.resting = dict(snapshot.resting)
    self.hold_again_s = snapshot.hold_again_s
    self.usual_norms = list(snapshot.usual_norms)
    self.left_clocks = dict(snapshot.left_clocks)
    self.lost = dict(snapshot.lost)
    self.away = dict(snapshot.away)
    self.awaits_shards = snapshot.awaits_shards
    self.give_up_shards_s = snapshot.give_up_shards_s
    self.give_up_lost_s = snapshot.give_up_lost_s
    self.knows_less = snapshot.knows_less
    self.told_until_round = snapshot.told_until_round
    self.were_live = snapshot.were_live
    self.last_round = snapshot.last_round
    self.finish_at_s = snapshot.finish_at_s
    self.finish_was_told = snapshot.finish_was_told
    self.ended = snapshot.ended

  def ledger(self) -> Ledger:
    return Ledger(
      step=self.pace.step,
      clocks=tuple(self.pace.clocks.items()),
      closed_round=self.closed_round,
      versions=tuple(self.versions),
      accounts=tuple(sorted(self.accounts.items())),
      quorum_s=self.quorum_s,
      sync_s=self.sync_s,
      usual_norms=tuple(self.usual_norms),
      last_round=self.last_round,
      ended=self.ended,
    )

  def resume(self, ledger: Ledger):
    """Continues from another process's ledger; all learners must join again."""
    self.pace = self._pace_clock(ledger.step)
    self.left_clocks = dict(ledger.clocks)
    self.were_live = frozenset(self.left_clocks)
    self.closed_round = ledger.closed_round
    self.versions = list(ledger.versions)
    self.accounts = dict(ledger.accounts)
    self.quorum_s, self.sync_s = ledger.quorum_s, ledger.sync_s
    self.usual_norms = list(ledger.usual_norms)
    self.last_round = ledger.last_round
    self.finish_was_told = ledger.last_round is not None
    if ledger.ended:
      self.ended = True
      self.knows_less = False

  # Questions ----------------------------------------------------------------

  @property
  def finishing(self) -> bool:
    return self.last_round is not None

  def live(self) -> dict[int, Member]:
    """Returns the learners that count, in ascending id."""
    return {m: x for m, x in self.members.items() if x.ready and not x.leaving}

  def quorum_now(self) -> int:
    """Returns K, at most the number of pullable learners and at least 1.

    A learner that has rested counts again once its bytes have arrived: until
    then its pulls are trials that no round waits for.
    """
    live = self.live()
    proven = [m for m in live if m not in self.resting]
    return max(1, min(self.config.quorum, len(proven or live)))

  def rests(self, learner: int) -> bool:
    """Returns True if a learner is not pulled from now; never true for all."""
    if self.now >= self.resting.get(learner, self.now):
      return False
    return any(self.now >= self.resting.get(m, self.now) for m in self.live())

  def transfer_time(self, learner: int) -> TransferTime:
    return self.transfers.get(learner, TransferTime())

  def merged(self, learner: int, fragment: int) -> MergedSteps:
    """Returns what has been merged of a learner's steps on a fragment."""
    return MergedSteps(
      self.accounts[learner].merged_bases.get(fragment, -1),
      self.members[learner].merged_steps.get(fragment),
    )

  def is_current(self, learner: int, incarnation: int) -> bool:
    member = self.members.get(learner)
    return member is not None and member.incarnation == incarnation

  def is_pulling(self, learner: int, held: HeldOffer) -> bool:
    """Returns True if the bytes of this very offer are being pulled."""
    return any(
      m == learner and m not in r.pulled and a.held is held
      for r in self.rounds.values()
      for m, a in r.pulls
    )

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

  def put(self, round_: Round, **fields) -> Round:
    round_ = changed(round_, **fields)
    self.rounds[round_.number] = round_
    return round_

  def drop_pull(self, round_: Round, learner: int) -> Round:
    """Takes a contribution out of a round; its bytes are no longer wanted."""
    admitted = dict(round_.pulls).get(learner)
    if admitted is not None:
      handle = admitted.held.offer.payload.handle
      pull = round_.number, learner, admitted.incarnation, handle
      self.emit(syncer_events.CancelPull(*pull))
    return self.put(round_, **round_.without(learner))

  def retire(self, learner: int, handle: int, pulled: bool = False):
    """Tells a learner that it may release one of its offers.

    Args:
      handle: the offer's handle.
      pulled: True if a round has its bytes and may merge them.
    """
    self.send(learner, messages.Retired((handle,), pulled))

  def serve(self, learner: int, fragment: int, reason: str):
    """Has the full fragment sent to a learner's session."""
    merged = self.accounts[learner].merged_offers.get(fragment, (0, 0))
    incarnation = self.members[learner].incarnation
    self.emit(
      syncer_events.SendFull(learner, incarnation, fragment, reason, merged)
    )
    self.forget_published(learner, fragment)  # It is delivered another way.

  def forget_published(self, learner: int, fragment: int):
    """Stops measuring how long an update takes to reach a learner."""
    published = dict(self.members[learner].published)
    if published.pop(fragment, None) is not None:
      self.change(learner, published=published)

  def drop_straggler(self, learner: int):
    """Cancels a learner's pull that no round waits for, if there is one."""
    member = self.members[learner]
    straggler = member.straggler
    if straggler is not None:
      pull = straggler.round, learner, member.incarnation, straggler.handle
      self.emit(syncer_events.CancelPull(*pull))
      self.change(learner, straggler=None)

  def discard_void(self, learner: int, fragment: int):
    """Drops an offer that can no longer be merged: used up, or too old.

    If a learner refreshed its offer while the older one was being pulled, the
    same steps would otherwise be merged twice, a whole cycle later.
    """
    member = self.members[learner]
    held = member.offers.get(fragment)
    if held is None or self.is_pulling(learner, held):
      return
    merged = self.merged(learner, fragment)
    reason = why_void(held.offer, merged, self.versions[fragment], self.config)
    if reason is None:
      return
    self.members[learner] = member.without_offer(fragment)
    self.retire(learner, held.offer.payload.handle)
    if not merged.has(held.offer):  # Otherwise nothing is lost with it.
      self.record('stale', learner, f'offer of fragment {fragment}: {reason}')

  # Effects ------------------------------------------------------------------

  def emit(self, effect: syncer_events.Effect):
    self.effects.append(effect)

  def send(self, learner: int, message):
    incarnation = self.members[learner].incarnation
    self.emit(syncer_events.Send(learner, incarnation, message))

  def record(self, kind: str, learner: int, reason: str):
    self.emit(syncer_events.LogDecision(kind, learner, reason))
