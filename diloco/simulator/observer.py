# SPDX-License-Identifier: Apache-2.0
"""Checks the invariants of a whole simulated cluster, tokens included."""

import collections
import math
from collections.abc import Callable

from diloco.metrics import token_ledger
from diloco.protocol import messages
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.learner import events as learner_events
from diloco.protocol.syncer import events as syncer_events
from diloco.simulator.contents import Counters, counters_of, crc_of
from diloco.simulator.engine import Observer
from diloco.simulator.invariants import Invariants, hold
from diloco.simulator.simulated_learner import OFFERS_MAX


class TokenObserver(Observer):
  """An observer of both sides; simulated learners know their tokens exactly.

  Args:
    fragments: P.

  Attributes:
    accounts: by learner id.
  """

  def __init__(self, fragments: int):
    self.accounts: dict[int, token_ledger.TokenAccount] = {}
    self._fragments = fragments
    self._begun = 0  # Processes so far.
    self._numbers: dict[object, int] = {}  # Of processes.
    self._sessions: dict[tuple[int, int], int] = {}  # Number, by incarnation.
    self._last: dict[int, object] = {}  # Processes, by number.

  def at_learner(self, process, event, effects):
    if process not in self._numbers:
      self._begin(process)
    number = self._numbers[process]
    account = self.accounts[process.id]
    match event:
      case learner_events.Connected(incarnation=incarnation):
        self._sessions[process.id, incarnation] = number
      case learner_events.Boundary(tokens=tokens):
        account.processes[number].last += tokens
    for effect in effects:
      match effect:
        case learner_events.Apply(fragment=p):
          account.apply(
            number,
            p,
            carry=effect.carry,
            handle=effect.handle,
            overwritten_tokens=effect.overwritten_tokens,
            training=process.training,
          )
        case learner_events.Snapshot(fragment=p, handle=handle):
          ours = account.processes[number]
          ours.offers[p, handle] = ours.last

  def at_syncer(self, syncer, event, effects):
    for effect in effects:
      if isinstance(effect, syncer_events.Publish):
        self._close(effect)

  def counts_from(self, process, fragment: int) -> int:
    """Returns the token count from which progress on θ_p is unsettled."""
    account = self.accounts[process.id]
    return account.processes[self._numbers[process]].counts[fragment]

  def rest(self):
    """Lets go of all processes: each is over, or goes on as another one."""
    self._note_ends()
    self._numbers.clear()
    self._sessions.clear()
    self._last.clear()

  def rows(self) -> dict[tuple[int, int], token_ledger.TokenCounts]:
    """Returns the current balance, by learner and fragment."""
    self._note_ends()
    return {
      (m, p): account.row(p)
      for m, account in sorted(self.accounts.items())
      for p in range(self._fragments)
    }

  def _note_ends(self):
    for number, process in self._last.items():
      self.accounts[process.id].processes[number].end = _end_of(process)

  def _begin(self, process):
    number = self._numbers[process] = self._begun
    self._begun += 1
    self._last[number] = process
    account = self.accounts.setdefault(
      process.id, token_ledger.TokenAccount(self._fragments)
    )
    state = process.machine.snapshot()
    counts = [fragment.from_tokens for fragment in state.fragments]
    account.begin(number, state.tokens, counts)

  def _close(self, publish: syncer_events.Publish):
    p, version = publish.fragment, publish.version
    for account in self.accounts.values():
      account.void(p, version)  # A ledger may have been lost.
    for share in publish.shares:
      number = self._sessions[share.learner, share.incarnation]
      name = number, share.handle
      merged = token_ledger.MergedContribution(p, version, name, share.c_tokens)
      self.accounts[share.learner].merge(merged)


def _end_of(process) -> str | None:
  """Returns why a process ended; None while it runs."""
  if not process.alive:
    return token_ledger.SLICE if process.handed_on else token_ledger.DIED
  if process.left is None or process.left.done:
    return None
  if process.left.reason.startswith('quarantined'):
    return token_ledger.QUARANTINED
  return token_ledger.LEFT


class ClusterObserver(Observer):
  """An observer of all processes at once.

  Numbers in the messages are those of *What always holds* in
  `diloco/protocol/README.md`.
  """

  def __init__(self, config: ProtocolConfig):
    self.events = 0
    # Called once, when the run begins to finish.
    self.when_finishing: Callable[[], None] | None = None
    self.tokens = TokenObserver(config.fragments)
    self._config = config
    self._syncer = None
    self._invariants = Invariants(config)
    self._theta = {(p, 0, crc_of(p, 0)) for p in range(config.fragments)}
    # By learner and incarnation.
    self._processes: dict[tuple[int, int], object] = {}
    # Times that a learner went on with other slices: in all, of which the tape
    # tells, and of these the ledger.
    self._changes: collections.Counter[int] = collections.Counter()
    self._changes_to: dict[object, int] = {}  # The former, up to a process.
    self._told: dict[int, int] = {}
    self._kept: dict[int, int] = {}
    self._newest: dict[int, object] = {}  # By learner.
    # Handles of copies made since a fragment was last taken in.
    self._copied: dict[tuple[object, int], set[int]] = {}
    self._held: dict[object, list[int]] = {}  # Versions, by process.
    self._reported: dict[object, int] = {}  # Steps that a process reported.
    self._trained_tokens: dict[int, int] = {}  # By id, like the three below.
    self._merged_tokens: dict[int, int] = {}
    self._trained_to: dict[int, int] = {}  # Position in the data.
    # `_trained_to`, as the syncer knows it.
    self._recorded_to: dict[int, int] = {}
    self._ledger_crcs: dict[int, tuple[int, int]] = {}  # By fragment.
    self._taking: dict[int, int] = {}  # The version, by fragment.
    # Sessions of which the syncer has not heard all; no real stream is one.
    self._torn: set[tuple[int, int]] = set()
    # Of each process and fragment, the own step up to which it was merged.
    self._merged_to: dict[tuple[object, int], int] = {}

  def _check_tick(self, event, machine, now: float):
    """Checks that a driver would not wake the machine up without end."""
    if isinstance(event, syncer_events.Tick | learner_events.Tick):
      deadline = machine.deadline()
      late = deadline is not None and deadline <= now
      hold(not late, '8: a tick that changes nothing', (deadline, now))

  # The syncer ---------------------------------------------------------------

  def syncer_started(self, syncer):
    self._syncer = syncer
    ledger = syncer.disk.ledger if syncer.disk else None
    self._invariants.restarted(ledger)
    accounts = ledger.accounts if ledger else ()
    self._recorded_to = {m: account.rows for m, account in accounts}
    if ledger is None:
      self._merged_to.clear()
      self._merged_tokens.clear()

    disk = syncer.disk
    self._ledger_crcs = (
      dict(enumerate(zip(disk.ledger.versions, disk.crcs))) if disk else {}
    )
    self._taking.clear()

  def theta(self, fragment: int, version: int, crc: int):
    self._theta.add((fragment, version, crc))
    # From a close, or from a version that no process has: the run continues.
    self._ledger_crcs[fragment] = version, crc

  def message_lost(self, learner: int, incarnation: int):
    self._torn.add((learner, incarnation))

  def at_syncer(self, syncer, event, effects):
    self.events += 1
    self.tokens.at_syncer(syncer, event, effects)
    snapshot = syncer.machine.snapshot()
    self._invariants.check(event, effects, snapshot)
    self._check_tick(event, syncer.machine, snapshot.now)
    if self.when_finishing is not None and snapshot.last_round is not None:
      finishing, self.when_finishing = self.when_finishing, None
      finishing()
    match event:
      case syncer_events.Heard(message=messages.Report(rows=rows)):
        member = dict(snapshot.members).get(event.learner)
        if member is not None and member.incarnation == event.incarnation:
          self._recorded_to[event.learner] = rows
    for effect in effects:
      match effect:
        case syncer_events.LogDecision(kind='refused', reason=reason):
          opening = isinstance(event.message, messages.OPENING)
          torn = (event.learner, event.incarnation) in self._torn
          hold(opening or torn, '7: a learner broke the protocol', reason)
        case syncer_events.LogReformed():
          self._check_reformed(effect)
        case syncer_events.Publish():
          self._kept = dict(self._told)
          self._check_weights(effect.shares)
          for share in effect.shares:
            self._check_merged(share, effect.fragment)
        case syncer_events.TakeFragment(offered=offered):
          self._taking[offered.fragment] = offered.version
        case syncer_events.AdoptVersion(
          fragment=p, version=version, taken_of=donor
        ):
          if donor is not None:
            crc = syncer.donated_crc(p, donor)
            self._check_recovered(p, version, crc)

  def merging(self, merge, taken: dict[int, Counters]):
    for share in merge.shares:
      said, found = counters_of(share), taken[share.learner]
      hold(said == found, '2: the bytes are of another offer', (share, found))

  def _check_recovered(self, p: int, version: int, crc: int):
    """5: a recovered version has the bytes that the ledger names."""
    if self._taking.get(p) == version:
      known, expected = self._ledger_crcs.get(p, (None, None))
      fact = known != version or expected in (None, crc)
      hold(fact, '5: recovered other bytes', (p, version))

  def _check_weights(self, shares):
    """2: weights are as c_tokens² / c_steps, whatever the batches."""
    if self._config.weighting != 'tokens':
      return
    due = [share.c_tokens**2 / share.c_steps for share in shares]
    for share, each in zip(shares, due):
      fact = math.isclose(share.weight, each / sum(due))
      hold(fact, '2: weighs otherwise', shares)

  def _check_reformed(self, effect: syncer_events.LogReformed):
    """6: a learner with other slices says what it goes on from, and lost."""
    process = self._processes[effect.learner, effect.incarnation]
    world = process.world
    said = effect.slices, effect.slices_of, effect.step
    due = world.slices, world.of, process.first_step
    hold(said == due, '6: other slices than it has', (effect, due))
    # It may have done so several times while no syncer was there; one that died
    # counts again what it has not kept. These steps are then in those of this
    # world, whose batch is another.
    so_far = self._changes[effect.learner]
    changes = self._changes_to.get(process, so_far)
    times = changes - self._kept.get(effect.learner, 0)
    self._told[effect.learner] = changes
    most = (process.copy_steps - 1) * (1 if times == 1 else times * world.of)
    fewer = effect.lost_steps <= most
    hold(fewer, '6: lost more than is made between two copies', effect)

  def _check_merged(self, share: syncer_events.Share, p: int):
    process = self._processes[share.learner, share.incarnation]
    merged_to = self._merged_to.get((process, p), 0)
    fact = share.step - share.c_steps >= merged_to
    hold(fact, '2: a step was merged twice', (share, p, merged_to))
    self._merged_to[process, p] = share.step
    if p == 0:  # Each step is merged once per fragment.
      tokens = self._merged_tokens.get(share.learner, 0) + share.c_tokens
      self._merged_tokens[share.learner] = tokens
      trained = self._trained_tokens.get(share.learner, 0)
      hold(tokens <= trained, '6: merged, not trained', (share, trained))

  # Learners -----------------------------------------------------------------

  def at_learner(self, process, event, effects):
    self.events += 1
    self.tokens.at_learner(process, event, effects)
    self._note_process(process, event, effects)
    match event:
      case learner_events.Boundary(tokens=tokens):
        trained = self._trained_tokens.get(process.id, 0) + tokens
        self._trained_tokens[process.id] = trained
        furthest = max(self._trained_to.get(process.id, 0), process.rows)
        self._trained_to[process.id] = furthest
      case learner_events.Rebuilt(fragment=p, version=version, crc=crc):
        fact = (p, version, crc) in self._theta
        hold(fact, '5: bytes that no syncer had', (process.id, event))
    for effect in effects:
      self._check_effect(process, effect)
    if self._config.overlap_steps > 0:
      waits = process.machine.waiting and not self._is_cut_off(process)
      hold(not waits, '4: the loop waits', process.id)
    self._check_host(process)
    self._check_bounds(process)
    now = process.machine.snapshot().now
    self._check_tick(event, process.machine, now)

  def _note_process(self, process, event, effects):
    """Notes a process; one whose slices go on counts from its welcome on."""
    self._processes[process.id, process.incarnation] = process
    old, self._newest[process.id] = self._newest.get(process.id), process
    if not process.world.reformed:
      return
    if old is not process:  # It has the steps that were merged of this one.
      self._changes[process.id] += 1
      # By the time that the syncer hears of it there may have been another.
      self._changes_to[process] = self._changes[process.id]
      for p in range(self._config.fragments):
        merged_to = self._merged_to.get((old, p), 0)
        self._merged_to[process, p] = min(merged_to, process.first_step)
    match event:
      case learner_events.Heard(message=messages.Welcome(clean=False)) if (
        process.online  # Otherwise it is of a session that has ended.
      ):
        ready = any(
          isinstance(x, learner_events.Send)
          and isinstance(x.message, messages.Ready)
          for x in effects
        )
        hold(ready, '7: slices that do not count at once', process.id)

  def _is_cut_off(self, process) -> bool:
    """Returns True if it is cut off and knows of no step that is left."""
    state = process.machine.snapshot()
    return not state.connected and state.global_step >= self._config.total_steps

  def _check_same_bytes(self, process):
    """5: at the first step, learner and syncer hold the same bytes.

    Over a silent link a welcome may come after its session has ended; what has
    changed since is in the welcome of the next one. Where the syncer has just
    gone on without a version that was lost, a full fragment may be on its way.
    """
    syncer = self._syncer
    if not syncer.alive or not syncer.machine.whole:
      return
    snapshot = syncer.machine.snapshot()
    member = dict(snapshot.members).get(process.id)
    if member is None or member.incarnation != process.incarnation:
      return
    versions = snapshot.versions
    fragments = process.machine.snapshot().fragments
    for p, version in enumerate(process.contents.versions):
      on_its_way = member.full_sent.get(p, 0) > fragments[p].received
      here = p not in syncer.machine.away and not on_its_way
      if version == versions[p] and here:
        same = process.contents.crcs[p] == syncer.crcs[p]
        hold(same, '5: begins with other bytes', (process.id, p, version))

  def _check_effect(self, process, effect: learner_events.Effect):
    match effect:
      case learner_events.Begin(rows=rows):
        recorded = self._recorded_to.get(process.id, 0)
        trained = self._trained_to.get(process.id, 0)
        where = process.id, recorded, rows, trained
        hold(recorded <= rows, 'data are repeated', where)
        hold(rows <= trained, 'data are skipped', where)
        if not process.world.reformed:  # It trains as after a reconnect.
          self._check_same_bytes(process)
      case learner_events.Snapshot(fragment=p, handle=handle):
        self._copied.setdefault((process, p), set()).add(handle)
      case learner_events.Apply(fragment=p):
        copied = self._copied.pop((process, p), set())
        fact = not effect.carry or effect.handle in copied
        hold(fact, '6: carries since a copy of earlier bytes', effect)
        ours = self.tokens.counts_from(process, p)
        theirs = process.machine.snapshot().fragments[p].from_tokens
        where = process.id, p, ours, theirs
        hold(ours == theirs, '6: counts from other tokens', where)
      case learner_events.DonateState():
        fact = process.training
        hold(fact, 'donates without a bootstrap of its own', process.id)
      case learner_events.Send(message=messages.Report()):
        self._tell(process, 1)
      case learner_events.Send(message=messages.Ready(steps_away=steps)):
        self._tell(process, steps)

  def _tell(self, process, steps: int):
    total = self._reported.get(process, 0) + steps
    self._reported[process] = total
    most = process.steps - process.first_step
    hold(total <= most, '3: more steps told of than made', (process.id, total))

  def _check_host(self, process):
    fragments = process.machine.snapshot().fragments
    held = [f.host for f in fragments]
    crcs = [f.crc for f in fragments]
    # The contents are drawn from the first; a machine knows when it has begun.
    drawn = [
      messages.NO_BYTES if crc == messages.NO_BYTES else there
      for crc, there in zip(crcs, process.contents.crcs, strict=True)
    ]
    theirs = process.contents.versions, drawn
    hold((held, crcs) == theirs, 'machine and host', (process.id, held, theirs))
    before = self._held.get(process, held)
    rose = all(now >= then for now, then in zip(held, before))
    hold(rose, '1: versions fell at a learner', (process.id, before, held))
    self._held[process] = held

  def _check_bounds(self, process):
    """8: what a process holds for others is bounded by M and P."""
    waiting = len(process.machine.snapshot().donations)
    hold(waiting <= 1, '8: donations asked for', (process.id, waiting))
    donations = len(process.donations)
    hold(donations <= 1, '8: donations', (process.id, donations))
    # One more copy of each, in case the syncer has lost it.
    most = (OFFERS_MAX + 1) * self._config.fragments
    offers = len(process.offers)
    hold(offers <= most, '8: offers', (process.id, offers))

  def check_tokens(self):
    """6: trained = merged + overwritten + lost + pending, on both sides."""
    for where, row in self.tokens.rows().items():
      hold(row.unexplained == 0, '6: unexplained tokens', (where, row))

  # At rest ------------------------------------------------------------------

  def check_at_rest(self, cluster):
    """Checks a cluster whose learners are all ready, with no message in flight.

    5: the same bytes wherever the same version is. 8: nothing is kept for
    former newcomers.
    """
    self.check_tokens()
    versions = cluster.syncer.machine.snapshot().versions
    for shard in cluster.others.values():
      for p, held in shard.held.items():
        run = versions[p], cluster.syncer.crcs[p]
        hold(held == run, '5: a shard has other bytes', (shard.shard, p))
    for m, process in sorted(cluster.learners.items()):
      if process.gone:
        continue
      kept = process.donations.keys() - process.withdrawn
      donations = kept, process.machine.snapshot().donations
      hold(not any(donations), '8: donations at rest', (m, donations))
      for p, version in enumerate(versions):
        if process.contents.versions[p] == version:
          same = process.contents.crcs[p] == cluster.syncer.crcs[p]
          hold(same, '5: other bytes', (m, p, version))
