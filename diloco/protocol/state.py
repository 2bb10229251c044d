# SPDX-License-Identifier: Apache-2.0
"""The syncer's state: what sessions and rounds read and change together."""

import dataclasses
from collections.abc import Mapping

from diloco.protocol import messages, syncer_io
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.grace import Ema
from diloco.protocol.members import Account, Member
from diloco.protocol.pace import PaceClock
from diloco.protocol.rounds import HeldOffer, MergedSteps, Round, why_void
from diloco.protocol.transfer_time import TransferTime
from diloco.protocol.values import changed


@dataclasses.dataclass(frozen=True)
class LostFragment:
  """A fragment of which a restarted syncer has only an older version."""

  version: int  # That it had at the last close; it keeps this number.
  crc: int | None  # Of its bytes then; None: not known.
  held: int  # The version that is here.
  asked: tuple[int, int] | None = None  # The session asked to donate it.
  offered: messages.FragmentOffered | None = None  # By that session.
  tried: tuple[tuple[int, int], ...] = ()  # Those that were, in vain.
  wanted_by: tuple[int, ...] = ()  # Who waits for it, in ascending id.
  # Of a shard that is back: no other fragment waits for it, and sessions that
  # went on meanwhile are asked what they have.
  alone: bool = False
  answered: tuple[tuple[int, int], ...] = ()  # The sessions that have said so.


@dataclasses.dataclass(frozen=True)
class Away:
  """A fragment whose shard is away."""

  wanted_by: tuple[int, ...] = ()  # Who waits for it, in ascending id.
  # What learners say that the run has of it, where the ledger was lost.
  adopted: bool = False
  crc: int | None = None

  def wanted(self, learner: int) -> 'Away':
    wanted_by = tuple(sorted({*self.wanted_by, learner}))
    return changed(self, wanted_by=wanted_by)

  def without(self, learner: int) -> 'Away':
    wanted_by = tuple(m for m in self.wanted_by if m != learner)
    return changed(self, wanted_by=wanted_by)


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """All that the machine knows, as a value: compared, saved, restored."""

  now: float
  step: int
  clocks: tuple[tuple[int, int], ...]
  closed_round: int
  versions: tuple[int, ...]
  members: tuple[tuple[int, Member], ...]
  accounts: tuple[tuple[int, Account], ...]
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
  were_live: frozenset[int]
  last_round: int | None
  finish_at_s: float | None
  finish_was_told: bool
  ended: bool


@dataclasses.dataclass(frozen=True)
class Ledger:
  """What outlives the syncer's process; sessions and open rounds do not."""

  step: int
  clocks: tuple[tuple[int, int], ...]
  closed_round: int
  versions: tuple[int, ...]
  accounts: tuple[tuple[int, Account], ...]
  quorum_s: Ema
  sync_s: Ema
  usual_norms: tuple[float | None, ...]
  last_round: int | None  # Set once the run is finishing.
  ended: bool


class State:
  """Mutable inside the machine; nobody else holds one."""

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
    self.accounts: dict[int, Account] = {}
    self.rounds: dict[int, Round] = {}  # Open ones, in ascending number.
    self.quorum_s = Ema()
    self.sync_s = Ema()  # From the first pull to the end of the merge.
    self.transfers: dict[int, TransferTime] = {}  # Of pulls, by learner.
    self.resting: dict[int, float] = {}  # By learner: not pulled until then.
    self.hold_again_s = float('-inf')  # No round waits for the slow before.
    # Of outer gradients, per √step, by fragment (`strikes.py`).
    self.usual_norms: list[float | None] = [None] * config.fragments
    self.left_clocks: dict[int, int] = {}  # Of those who may be back.
    # A restarted syncer's (`recovery.py`): the fragments that it lost, and
    # whether learners may know of later rounds than it does.
    self.lost: dict[int, LostFragment] = {}
    self.give_up_lost_s: float | None = None
    # Of a sharded one (`absence.py`): the fragments whose shard is away, and
    # whether this process has still to see all of its shards.
    self.away: dict[int, Away] = {}
    self.awaits_shards = False
    self.give_up_shards_s: float | None = None
    self.were_live: frozenset[int] = frozenset()  # At the ledger's close.
    self.knows_less = True  # Until its own first merge.
    self.last_round: int | None = None  # Set once the run is finishing.
    # Until then learners may hand in; None: nobody is live that could.
    self.finish_at_s: float | None = None
    self.finish_was_told = False  # Of the finish, by a process before this one.
    self.ended = False
    self.effects: list[syncer_io.Effect] = []

  def snapshot(self) -> Snapshot:
    return Snapshot(
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
      were_live=self.were_live,
      last_round=self.last_round,
      finish_at_s=self.finish_at_s,
      finish_was_told=self.finish_was_told,
      ended=self.ended,
    )

  def load(self, snapshot: Snapshot):
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
    """Goes on where another process left off; everyone has to join again."""
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
    """The learners that count, in ascending id."""
    return {m: x for m, x in self.members.items() if x.ready and not x.leaving}

  def quorum_now(self) -> int:
    """K, but no more than there are learners to pull from, and at least 1.

    One that has rested counts again once its bytes have come: until then its
    pulls are trials, for which nobody waits.
    """
    live = self.live()
    proven = [m for m in live if m not in self.resting]
    return max(1, min(self.config.quorum, len(proven or live)))

  def rests(self, learner: int) -> bool:
    """Whether nothing is pulled from it for now; never from nobody at all."""
    if self.now >= self.resting.get(learner, self.now):
      return False
    return any(self.now >= self.resting.get(m, self.now) for m in self.live())

  def transfer_time(self, learner: int) -> TransferTime:
    return self.transfers.get(learner, TransferTime())

  def merged(self, learner: int, fragment: int) -> MergedSteps:
    """What has been merged of a learner's steps on a fragment."""
    return MergedSteps(
      self.accounts[learner].merged_bases.get(fragment, -1),
      self.members[learner].merged_steps.get(fragment),
    )

  def is_current(self, learner: int, incarnation: int) -> bool:
    member = self.members.get(learner)
    return member is not None and member.incarnation == incarnation

  def is_pulling(self, learner: int, held: HeldOffer) -> bool:
    """Whether the bytes of this very offer are under way."""
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
    """How many learners the run begins with.

    τ = 0 is synchronous: who was compiled first would else close rounds
    alone, and no two runs would be alike. Later K is at most those who live.
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
    """Takes a contribution out of a round; its bytes are wanted no more."""
    admitted = dict(round_.pulls).get(learner)
    if admitted is not None:
      handle = admitted.held.offer.payload.handle
      pull = round_.number, learner, admitted.incarnation, handle
      self.emit(syncer_io.CancelPull(*pull))
    return self.put(round_, **round_.without(learner))

  def retire(self, learner: int, handle: int, pulled: bool = False):
    """Tells a learner that one of its offers need not be held any longer.

    Args:
      learner: whose.
      handle: of the offer.
      pulled: a round has its bytes, and may merge them.
    """
    self.send(learner, messages.Retired((handle,), pulled))

  def serve(self, learner: int, fragment: int, reason: str):
    """Has the full fragment sent to a session."""
    merged = self.accounts[learner].merged_offers.get(fragment, (0, 0))
    incarnation = self.members[learner].incarnation
    self.emit(syncer_io.Serve(learner, incarnation, fragment, reason, merged))
    self.forget_published(learner, fragment)  # It comes another way.

  def forget_published(self, learner: int, fragment: int):
    """How long the update takes to a learner will not be known."""
    published = dict(self.members[learner].published)
    if published.pop(fragment, None) is not None:
      self.change(learner, published=published)

  def drop_straggler(self, learner: int):
    """Its bytes are wanted no more, if any are under way for no round."""
    member = self.members[learner]
    straggler = member.straggler
    if straggler is not None:
      pull = straggler.round, learner, member.incarnation, straggler.handle
      self.emit(syncer_io.CancelPull(*pull))
      self.change(learner, straggler=None)

  def discard_void(self, learner: int, fragment: int):
    """Drops an offer that can't be merged any more: used up, or too old.

    A learner that refreshed its offer while the older one was being pulled
    would else have the same steps merged twice, a whole cycle later.
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
    if not merged.has(held.offer):  # Else nothing is lost with it.
      self.record('stale', learner, f'offer of fragment {fragment}: {reason}')

  # Effects ------------------------------------------------------------------

  def emit(self, effect: syncer_io.Effect):
    self.effects.append(effect)

  def send(self, learner: int, message):
    incarnation = self.members[learner].incarnation
    self.emit(syncer_io.Send(learner, incarnation, message))

  def record(self, kind: str, learner: int, reason: str):
    self.emit(syncer_io.Record(kind, learner, reason))
