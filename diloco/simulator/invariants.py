# SPDX-License-Identifier: Apache-2.0
"""Checks the syncer's invariants after every event."""

from diloco.protocol import messages, timeouts
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer import recovery
from diloco.protocol.syncer.state import Ledger, Member, SyncerSnapshot


class Violation(AssertionError):
  """An invariant of the protocol does not hold."""


def hold(fact: bool, invariant: str, evidence):
  """Raises `Violation` unless `fact` is true."""
  if not fact:
    raise Violation(f'{invariant}: {evidence}')


class Invariants:
  """Observes the syncer from outside: events, effects, snapshots.

  Numbers in the messages are those of *What always holds* in
  `diloco/protocol/README.md`. Its memory outlives the syncer's process, as the
  ledger does.
  """

  def __init__(self, config: ProtocolConfig):
    self._config = config
    self._known: Ledger | None = None  # When the current process started.
    self._ids: set[int] = set()
    self._forget_all()
    self._forget_sessions()

  def restarted(self, ledger: Ledger | None):
    """Notes a new process of the syncer, and its ledger; None: no ledger."""
    self._forget_sessions()
    if ledger is None:
      self._forget_all()
      return
    now = tuple(self._versions)
    hold(ledger.versions == now, '1: versions of the ledger', (ledger, now))
    self._step, self._closed_round = ledger.step, ledger.closed_round
    self._left_clocks = dict(ledger.clocks)
    # Events after the last close are forgotten with the process.
    self._quarantined = {m for m, a in ledger.accounts if a.quarantined}

  def check(
    self,
    event: syncer_events.Event,
    effects: list[syncer_events.Effect],
    snapshot: SyncerSnapshot,
  ):
    """Raises `Violation` for the first invariant that does not hold."""
    self._note_event(event)
    self._away = dict(snapshot.away)
    for effect in effects:
      self._check_effect(event, effect, snapshot)
    self._check_progress(snapshot)
    self._check_clocks(event, effects, snapshot)
    self._check_bounds(snapshot)
    self._check_silence(snapshot)
    self._check_turn(snapshot)

  def _forget_all(self):
    """Forgets what was merged, along with a lost ledger."""
    self._versions = [0] * self._config.fragments
    self._merged: set[tuple[int, int, int]] = set()
    self._merged_tokens: dict[int, int] = {}
    self._quarantined: set[int] = set()
    self._closed_round = 0
    self._step = 0
    self._left_clocks: dict[int, int] = {}

  def _forget_sessions(self):
    self._incarnations: dict[int, int] = {}  # For open sessions.
    self._hellos: dict[int, messages.Hello] = {}
    self._ready: set[int] = set()
    self._clocks: dict[int, int] = {}
    self._held: dict[tuple[int, int], set[int]] = {}  # Handles, by session.
    self._bounded: dict[int, Member] = {}  # As last checked.

  def _note_event(self, event: syncer_events.Event):
    match event:
      case syncer_events.Heard(message=messages.Hello() as hello):
        self._ids.add(hello.learner)
        self._hellos[hello.learner] = hello
      case syncer_events.Heard(message=messages.Offer() as offer):
        session = event.learner, event.incarnation
        if self._incarnations.get(event.learner) == event.incarnation:
          self._held.setdefault(session, set()).add(offer.payload.handle)

  # Effects ------------------------------------------------------------------

  def _check_effect(
    self,
    event: syncer_events.Event,
    effect: syncer_events.Effect,
    after: SyncerSnapshot,
  ):
    match effect:
      case syncer_events.AdmitLearner():
        self._incarnations[effect.learner] = effect.incarnation
        self._ready.discard(effect.learner)
        self._note_adopted(effect)
      case syncer_events.EndSession():
        if self._incarnations.get(effect.learner) == effect.incarnation:
          del self._incarnations[effect.learner]
          self._ready.discard(effect.learner)
        self._held.pop((effect.learner, effect.incarnation), None)
      case syncer_events.LogDecision(kind='adopted'):
        self._note_versions(after.versions, effect)
      case syncer_events.LogDecision(kind='ready'):
        self._check_ready(effect.learner)
      case syncer_events.LogDecision(kind='quarantined'):
        self._quarantined.add(effect.learner)
      case syncer_events.Send():
        self._check_send(effect)
      case syncer_events.Merge():
        self._check_merge(effect)
      case syncer_events.Publish():
        self._check_publish(effect, after)

  def _note_adopted(self, greet: syncer_events.AdmitLearner):
    """Notes versions that learners know of and the ledger does not."""
    self._note_versions(greet.versions, greet)

  def _note_versions(self, versions: tuple[int, ...], evidence):
    """Checks that versions do not fall."""
    for p, version in enumerate(versions):
      fell = version < self._versions[p]
      hold(not fell, '1: versions fell', (evidence, self._versions))
      self._versions[p] = version

  def _check_ready(self, learner: int):
    self._ready.add(learner)
    if learner in self._quarantined:
      clean = not self._hellos[learner].began
      hold(clean, 'quarantined without a clean bootstrap', learner)
      self._quarantined.discard(learner)

  def _check_send(self, send: syncer_events.Send):
    match send.message:
      case messages.Retired(handles=handles):
        session = send.learner, send.incarnation
        self._held.get(session, set()).difference_update(handles)
      case messages.Donate():
        fact = send.learner in self._ready
        hold(fact, 'a donor that has not completed a bootstrap', send)

  def _check_merge(self, merge: syncer_events.Merge):
    here = merge.fragment not in self._away
    hold(here, '9: merged while its shard is away', merge)
    learners = [share.learner for share in merge.shares]
    hold(learners == sorted(set(learners)), 'sums run in id order', merge)
    total = sum(share.weight for share in merge.shares)
    hold(abs(total - 1.0) < 1e-9, 'weights sum to 1', merge)
    for share in merge.shares:
      alive = self._incarnations.get(share.learner) == share.incarnation
      hold(alive, '2: merged after its incarnation ended', share)
      hold(share.learner in self._ready, 'merged before it was ready', share)
      hold(share.learner not in self._quarantined, 'quarantined', share)
      hold(share.c_steps >= 1, '2: merged without a step', share)
      contribution = share.learner, merge.fragment, share.base_version
      hold(contribution not in self._merged, '2: merged twice', share)
      staleness = self._versions[merge.fragment] - share.base_version
      limit = self._config.max_staleness_versions
      hold(staleness <= limit, 'staleness limit', share)

  def _check_publish(
    self, publish: syncer_events.Publish, after: SyncerSnapshot
  ):
    """Checks a publish; before it, a merge may die with its syncer."""
    p = publish.fragment
    expected = self._versions[p] + 1
    hold(publish.version == expected, '1: one more per close', publish)
    self._versions[p] = publish.version
    sessions = dict(publish.recipients)
    hold(sessions == self._incarnations, 'every session is told', publish)
    for share in publish.shares:
      m = share.learner
      self._merged.add((m, p, share.base_version))
      tokens = self._merged_tokens.get(m, 0) + share.c_tokens
      self._merged_tokens[m] = tokens
    counted = {m: a.merged_tokens for m, a in after.accounts}
    ours = {m: self._merged_tokens.get(m, 0) for m in counted}
    hold(counted == ours, '6: tokens of the accounts', (counted, ours))

  # Snapshots ----------------------------------------------------------------

  def _check_progress(self, snapshot: SyncerSnapshot):
    config = self._config
    hold(snapshot.step >= self._step, 't fell', snapshot)
    closed = snapshot.closed_round
    hold(closed >= self._closed_round, 'rounds reopened', snapshot)
    self._closed_round = closed
    opened = closed + len(snapshot.open_rounds)
    if snapshot.last_round is None:
      due = snapshot.step // config.spacing_steps
      hold(opened <= due, '3: more rounds than the pace allows', snapshot)
      room = config.inflight_max
    else:
      hold(opened <= snapshot.last_round, 'rounds after the end', snapshot)
      room = config.fragments
    hold(len(snapshot.open_rounds) <= room, '8: open rounds', snapshot)
    hold(tuple(self._versions) == snapshot.versions, '1: versions', snapshot)
    # One waiting per fragment, one in progress per open round, and one that no
    # round waits for any more.
    most = config.fragments + room + 1
    for (learner, _), handles in self._held.items():
      if len(handles) > most:
        hold(False, f'8: offers of learner {learner}', handles)

  def _check_leap(
    self,
    event: syncer_events.Event,
    effects: list[syncer_events.Effect],
    snapshot: SyncerSnapshot,
  ):
    """3: t rises step by step, or by a spacing if the set of live learners
    changes.
    """
    if self._is_told(event, snapshot) or self._config.overlap_steps == 0:
      return  # At τ = 0 all wait for a round, which has come.
    changes = sum(
      isinstance(effect, syncer_events.LogDecision)
      and effect.kind in ('ready', 'leaving', 'left')
      for effect in effects
    )
    steps = sum(self._steps_said(event).values())
    most = self._step + steps + changes * self._config.spacing_steps
    hold(snapshot.step <= most, '3: t leaps', (self._step, event, effects))

  def _check_clocks(
    self,
    event: syncer_events.Event,
    effects: list[syncer_events.Effect],
    snapshot: SyncerSnapshot,
  ):
    """3: a clock grows by the steps that its learner reports."""
    config = self._config
    clocks = dict(snapshot.clocks)
    if clocks == self._clocks and snapshot.step == self._step:
      return  # Unchanged since it was last checked.
    steps = self._steps_said(event)
    for learner, clock in clocks.items():
      before = self._clocks.get(learner, self._left_clocks.get(learner, 0))
      most = before + steps.get(learner, 0)
      due = self._due_step(event, learner)
      fact = clock <= max(snapshot.step, most, due)
      hold(fact, f'3: the clock of learner {learner}', (before, event, clock))
      # τ = 0: as far as the round that all wait for.
      bound = max(snapshot.step + config.clock_ahead_max, due)
      hold(clock <= bound, f'3: learner {learner} is too far ahead', clock)
    self._check_leap(event, effects, snapshot)
    if snapshot.step > self._step and not self._is_told(event, snapshot):
      reported = [c + steps.get(m, 0) for m, c in self._clocks.items()]
      most = max([*clocks.values(), *reported], default=0)
      hold(snapshot.step <= most, '3: t is ahead of every clock', snapshot)
    self._step = snapshot.step
    for learner in self._clocks.keys() - clocks.keys():
      # Its session may end with its own report: three pulls were late.
      left = self._clocks[learner] + steps.get(learner, 0)
      self._left_clocks[learner] = left
    self._clocks = clocks

  def _steps_said(self, event: syncer_events.Event) -> dict[int, int]:
    match event:
      case syncer_events.Heard(message=messages.Report()):
        return {event.learner: 1}
      case syncer_events.Heard(message=messages.Ready(steps_away=steps)):
        return {event.learner: steps}
    return {}

  def _due_step(self, event: syncer_events.Event, learner: int) -> int:
    """Returns the step that a learner with an offer at τ = 0 waits for."""
    match event:
      case syncer_events.Heard(message=messages.Offer(round=round_)):
        if event.learner == learner and self._config.overlap_steps == 0:
          return round_ * self._config.spacing_steps
    return 0

  def _is_told(
    self, event: syncer_events.Event, snapshot: SyncerSnapshot
  ) -> bool:
    """Returns True for an event with knowledge from before a restart."""
    handed_in = [m.handed_in for _, m in snapshot.members]
    if snapshot.last_round is not None and handed_in and None not in handed_in:
      return True  # All that are here were told to finish.
    match event:
      case syncer_events.Heard(message=messages.Hello() | messages.HandedIn()):
        return True
      case syncer_events.ShardReturned():
        return True
    return False

  def _check_silence(self, snapshot: SyncerSnapshot):
    """7: no absent learner is waited for."""
    if snapshot.last_round is not None:
      return
    for learner, member in snapshot.members:
      most_s = timeouts.silence_max_s(member.step_s, self._config.patience)
      # A difference of the two times would be rounded otherwise.
      until_s = member.heard_s + most_s
      hold(
        snapshot.now < until_s, '7: silent and still here', (learner, until_s)
      )

  def _check_turn(self, snapshot: SyncerSnapshot):
    """9: no round waits for a fragment whose shard is away."""
    waits = snapshot.awaits_shards or any(
      not lost.alone for _, lost in snapshot.lost
    )
    if waits or snapshot.last_round is not None:
      return
    for round_ in snapshot.open_rounds:
      if round_.number == snapshot.closed_round + 1:
        gone = round_.fragment in dict(snapshot.away) | dict(snapshot.lost)
        hold(not gone, '9: a round waits for who is away', round_)

  def _check_bounds(self, snapshot: SyncerSnapshot):
    """8: what is kept is bounded by M, the ids that ever came, and by P."""
    ids, fragments = len(self._ids), self._config.fragments
    sizes = [
      ('members', len(snapshot.members), ids),
      ('accounts', len(snapshot.accounts), ids),
      ('left clocks', len(snapshot.left_clocks), ids),
      ('times of transfers', len(snapshot.transfers), ids),
      ('who rests', len(snapshot.resting), ids),
      ('lost fragments', len(snapshot.lost), fragments),
    ]
    for p, lost in snapshot.lost:
      sizes += [
        (f'tried for {p}', len(lost.tried), recovery.TRIES_MAX * ids),
        (f'waiting for {p}', len(lost.wanted_by), ids),
        (f'answers about {p}', len(lost.answered), ids),
      ]
    for p, away in snapshot.away:
      sizes.append((f'waiting for {p}, away', len(away.wanted_by), ids))
    for m, member in snapshot.members:
      if self._bounded.get(m) is member:
        continue  # Unchanged since it was checked, and the bound never falls.
      self._bounded[m] = member
      sizes += [
        (f'donors of {m}', len(member.tried), ids),
        (f'offers of {m}', len(member.offers), fragments),
      ]
    for name, size, most in sizes:
      if size > most:
        hold(False, f'8: {name}', (size, most))
