# SPDX-License-Identifier: Apache-2.0
"""One process of the syncer in a simulated cluster, around the real machine."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

from diloco.protocol import messages, timeouts
from diloco.protocol.config import UPDATES_KEPT
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer.machine import Syncer
from diloco.protocol.syncer.state import Ledger
from diloco.simulator.contents import (
  FINGERPRINTS,
  RUN,
  Carried,
  RefusedContribution,
)
from diloco.simulator.engine import Alarm
from diloco.simulator.network import SYNCER, Cargo

# (round, learner, incarnation, handle).
PullKey = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Disk:
  """The ledger of the last close, and a checkpoint that may be older.

  Tuples are by fragment.
  """

  ledger: Ledger
  crcs: tuple[int | None, ...]  # At the ledger's versions; None: unknown.
  held: tuple[int, ...]  # Versions in the checkpoint,
  held_crcs: tuple[int, ...]  # CRCs of its bytes,
  saved: Any  # and the bytes, as the contents saved them.


def pull_key(
  round_: int, learner: int, incarnation: int, handle: int
) -> PullKey:
  """Returns the key that distinguishes a pull from all others."""
  return round_, learner, incarnation, handle


Bytes = tuple[int, int]  # Version, and the CRC that stands for the bytes.


def owner_of(fragment: int, shards: int) -> int:
  """Returns the owner: fragments are dealt in turn, from after the leader."""
  return (fragment + 1) % shards


class SimulatedShard:
  """A shard, over all of its processes.

  Args:
    cluster: the cluster that it is part of.
    shard: its number, not 0: that is the leader's.
  """

  def __init__(self, cluster, shard: int):
    self.alive = True
    self.process = 1  # Jobs of earlier processes are void.
    self.shard = shard
    self._cluster = cluster
    self.fragments = tuple(
      p
      for p in range(cluster.config.fragments)
      if owner_of(p, cluster.shards) == shard
    )
    self.held: dict[int, Bytes] = {
      p: (0, cluster.contents.first_crcs[p]) for p in self.fragments
    }
    self._saved = dict(self.held)
    # What was installed last, when, and what was there before.
    self._last: tuple[float, int, Bytes] | None = None

  def install(self, fragment: int, version: int, crc: int):
    """Installs what the leader has published."""
    self._last = self._cluster.sim.now, fragment, self.held[fragment]
    self.held[fragment] = version, crc

  def save(self):
    """Writes a checkpoint, unless it is dead."""
    if self.alive:
      self._saved = dict(self.held)

  def kill(self):
    """Simulates kill -9; what it had written stays."""
    assert self.alive, f'shard {self.shard} is dead'
    self.alive = False
    reason = f'shard {self.shard} is away'
    absent = syncer_events.ShardLost(self.fragments, reason)
    syncer, sim = self._cluster.syncer, self._cluster.sim
    if self.fragments:
      latency_s = self._cluster.timing.latency_s
      sim.after(latency_s, lambda: syncer.deliver(absent))

  def start(self):
    """Starts a new process, which resumes from the checkpoint."""
    assert not self.alive, f'shard {self.shard} is alive'
    self.alive = True
    self.process += 1
    self.held = dict(self._saved)
    self._last = None
    self.greet()

  def greet(self):
    """Tells the current leader what is here."""
    process, syncer = self.process, self._cluster.syncer
    held = dict(self.held)

    def arrive():
      if self.alive and self.process == process:
        syncer.shard_is_back(self.shard, process, held)

    if self.fragments:
      self._cluster.sim.after(self._cluster.timing.latency_s, arrive)

  def lose_leader(self):
    """Undoes an order that the dying leader has just sent and that is lost."""
    if self._last is None:
      return
    at_s, fragment, before = self._last
    if self._cluster.sim.now - at_s < self._cluster.timing.latency_s:
      self.held[fragment] = before
    self._last = None


class ShardReturnedFrom(syncer_events.ShardReturned):
  """A `ShardReturned` with the process that sent it, which the leader talks to
  from now on.
  """

  shard: int = 0
  process: int = 0


class SimulatedSyncer:
  """The machine, what stands for Θ, and the disk that it writes to.

  Args:
    cluster: the cluster that it is part of.
    disk: the disk of an earlier process, if any.
  """

  def __init__(self, cluster, disk: Disk | None):
    self.alive = True
    self.stopped = False
    self.merging = 0  # Merges that are not published.
    self.disk = disk
    self._cluster = cluster
    self._unread: list[Callable[[], None]] = []  # While it is stopped.
    self._pulling: set[PullKey] = set()  # In progress.
    self._taken: dict[PullKey, Any] = {}  # Results of pulls.
    # Whole fragments that learners have given, until the machine takes one.
    self._donated: dict[tuple[int, tuple[int, int]], tuple[int, Any, int]] = {}
    self._waits_for_disk: list[Callable[[], None]] = []
    # Handles on offer: by session and fragment, of updates and full fragments.
    self._offered: dict[tuple, collections.deque[int]] = {}
    self._alarm = Alarm(
      cluster.sim,
      lambda: self.machine.deadline() if self.alive else None,
      lambda: self.deliver(syncer_events.Tick()),
    )
    run = cluster.config, RUN, FINGERPRINTS
    away = [p for shard in cluster.others.values() for p in shard.fragments]
    # By shard, the process that it talks to.
    self._processes: dict[int, int] = {}
    # The run's version and CRC of each fragment, as far as this process knows.
    first = enumerate(cluster.contents.first_crcs)
    self._known = {p: (0, crc) for p, crc in first}
    if disk is None:
      self.contents = cluster.contents.syncer(cluster.contents.first_crcs, None)
      self.machine = Syncer(*run, away)
    else:
      self.contents = cluster.contents.syncer(disk.held_crcs, disk.saved)
      self.machine = Syncer.resume(
        *run, disk.ledger, disk.held, disk.crcs, away
      )
      self._known = dict(enumerate(zip(disk.ledger.versions, disk.crcs)))
      for p in away:  # For welcomes, until the shard has reported.
        if disk.crcs[p] is not None:
          self.contents.crcs[p] = disk.crcs[p]

  @property
  def crcs(self) -> list[int]:
    """The CRCs of Θ, by fragment."""
    return self.contents.crcs

  def donated_crc(self, p: int, session: tuple[int, int]) -> int:
    """The CRC of a whole fragment that a learner has given."""
    return self._donated[p, session][2]

  @property
  def now(self) -> float:
    return self._cluster.sim.now

  def deliver(self, event: syncer_events.Event):
    """Handles an event: performs the effects, sets the next wake-up."""
    if not self.alive:
      return
    if self.stopped:
      self._unread.append(lambda: self.deliver(event))
      return
    if isinstance(event, ShardReturnedFrom):
      self._processes[event.shard] = event.process
    effects = self.machine.handle(event, self._cluster.sim.now)
    self._cluster.observer.at_syncer(self, event, effects)
    for effect in effects:
      self._perform(effect)
    self._alarm.set()

  def offers(
    self, session: tuple[int, int], fragment: int, handle: int
  ) -> bool:
    """Returns True if what was announced to a session can still be pulled."""
    return any(
      handle in self._offered.get((session, fragment, full), ())
      for full in (False, True)
    )

  def _offer(
    self, session: tuple[int, int], fragment: int, full: bool, handle: int
  ):
    """Keeps as many offers as a real one does, and withdraws older ones."""
    kept = collections.deque(maxlen=1 if full else UPDATES_KEPT)
    self._offered.setdefault((session, fragment, full), kept).append(handle)

  def save(self) -> Disk:
    """Writes ledger and checkpoint; returns the disk."""
    self._write_ledger(checkpoint=True)
    return self.disk

  def resume(self):
    """Reads what came while it was stopped."""
    self.stopped = False
    unread, self._unread = self._unread, []
    for read in unread:
      read()

  def disk_is_free(self):
    """Closes the round whose ledger could not be written."""
    waiting, self._waits_for_disk = self._waits_for_disk, []
    for callback in waiting:
      callback()

  def shard_is_back(
    self, shard: int, process: int, held: dict[int, tuple[int, int]]
  ):
    """Notes what a shard has reported."""
    if self.stopped:
      self._unread.append(lambda: self.shard_is_back(shard, process, held))
    elif self.alive:
      states = tuple(self._held(p, *x) for p, x in sorted(held.items()))
      self.deliver(ShardReturnedFrom(states, shard, process))

  def _held(self, p: int, version: int, crc: int) -> syncer_events.Held:
    known_version, known_crc = self._known[p]
    same = version != known_version or known_crc in (None, crc)
    self.contents.crcs[p] = crc
    run_crc = known_crc if version <= known_version else None
    # The ledger was lost: it does not know the version, or not its bytes.
    adopted = version > known_version and self.machine.knows_less
    if adopted or (version == known_version and known_crc is None):
      self._known[p] = version, crc
    return syncer_events.Held(p, version, run_crc, same)

  def _perform(self, effect: syncer_events.Effect):
    cluster = self._cluster
    match effect:
      case syncer_events.AdmitLearner():
        self._greet(effect)
      case syncer_events.Send():
        cluster.to_learner(effect.learner, effect.incarnation, effect.message)
      case syncer_events.EndSession():
        session = effect.learner, effect.incarnation
        offered = self._offered.items()
        self._offered = {k: x for k, x in offered if k[0] != session}
        cluster.drop(effect)
      case syncer_events.Pull():
        self._pull(effect)
      case syncer_events.CancelPull():
        key = pull_key(*dataclasses.astuple(effect))
        self._pulling.discard(key)
        self._taken.pop(key, None)
      case syncer_events.Merge():
        self._merge(effect)
      case syncer_events.KeepLedger():
        self._write_ledger()
      case syncer_events.Publish():
        self._publish(effect)
      case syncer_events.SendFull():
        self._serve(effect)
      case syncer_events.TakeFragment():
        self._take_fragment(effect)
      case syncer_events.End():
        self._write_ledger()
        cluster.ended = effect
      case syncer_events.AdoptVersion():
        p = effect.fragment
        if effect.taken_of is not None:
          self.contents.take_fragment(p, *self._donated[p, effect.taken_of])
        self._donated = {k: x for k, x in self._donated.items() if k[0] != p}
        self.contents.relabel(p, effect.version)
        cluster.observer.theta(p, effect.version, self.crcs[p])
        self._install(p, effect.version)
        if self.machine.whole:
          self._write_ledger()
      case (
        syncer_events.Retire()
        | syncer_events.LogDecision()
        | syncer_events.LogReformed()
      ):
        pass  # No bytes are held here, no event log is written.
      case _:
        raise TypeError(f'Not a syncer effect: {effect!r}.')

  def _greet(self, effect: syncer_events.AdmitLearner):
    crcs = dict(enumerate(self.crcs)) | dict(effect.lost_crcs)
    welcome = messages.Welcome(
      effect.step,
      effect.closed_round,
      effect.versions,
      tuple(crcs.values()),
      effect.rows,
      effect.live,
      effect.clean,
      ('syncer',),
    )
    self._cluster.to_learner(effect.learner, effect.incarnation, welcome)

  def _merge(self, effect: syncer_events.Merge):
    merged = {}
    for s in effect.shares:
      key = pull_key(effect.round, s.learner, s.incarnation, s.handle)
      merged[s.learner] = self._taken.pop(key)
    self._cluster.observer.merging(effect, merged)
    self.contents.merge(effect, merged)
    self.merging += 1
    order = self._order(effect.fragment)

    def done():
      if self._cluster.disk_full:
        self._waits_for_disk.append(done)
      elif order():
        self.deliver(syncer_events.Merged(effect.round))

    self._cluster.sim.after(self._cluster.timing.merge_s, done)

  def _install(self, p: int, version: int):
    """Sets Θ_p to `version` where it lies; the ledger has it already."""
    self._known[p] = version, self.crcs[p]
    shard = self._cluster.others.get(owner_of(p, self._cluster.shards))
    if shard is not None and self._order(p)():
      shard.install(p, version, self.crcs[p])

  def _order(self, fragment: int) -> Callable[[], bool]:
    """Makes an order to the process that has the fragment, as far as known.

    It returns False, and is void, once that process is dead.
    """
    number = owner_of(fragment, self._cluster.shards)
    shard = self._cluster.others.get(number)
    process = self._processes.get(number, 0)
    return lambda: shard is None or (shard.alive and shard.process == process)

  def _publish(self, effect: syncer_events.Publish):
    """First saves what must not be lost, then tells the others."""
    p = effect.fragment
    self.merging -= 1
    data = self.contents.publish(p, effect.version)
    self._cluster.observer.theta(p, effect.version, self.crcs[p])
    checkpoint = effect.round % self._cluster.options.checkpoint_rounds == 0
    self._write_ledger(checkpoint)
    self._install(p, effect.version)
    for shard in self._cluster.others.values() if checkpoint else ():
      shard.save()
    order = self._order(p)
    handle = self._cluster.next_handle()
    payload = Carried(handle, 'down', 1, 0, data=data, order=order)
    for session in effect.recipients:
      self._offer(session, p, False, handle)
      update = effect.update(session, payload, self.crcs[p])
      self._cluster.to_learner(*session, update)

  def _write_ledger(self, checkpoint: bool = False):
    ledger = self.machine.ledger()
    known = dict(enumerate(self.crcs)) | self.machine.lost_crcs
    crcs = tuple(known.values())
    if checkpoint:
      saved = self.contents.save()
      self.disk = Disk(ledger, crcs, ledger.versions, crcs, saved)
    elif self.disk is None:
      first = self._cluster.contents.first_crcs
      self.disk = Disk(ledger, crcs, (0,) * len(first), first, None)
    else:
      self.disk = dataclasses.replace(self.disk, ledger=ledger, crcs=crcs)

  def _serve(self, effect: syncer_events.SendFull):
    session = effect.learner, effect.incarnation
    handle = self._cluster.next_handle()
    self._offer(session, effect.fragment, True, handle)
    message = messages.FullFragment(
      effect.fragment,
      self.machine.snapshot().versions[effect.fragment],
      Carried(
        handle,
        'f32',
        1,
        0,
        data=self.contents.fragment(effect.fragment),
        order=self._order(effect.fragment),
      ),
      self.crcs[effect.fragment],
      *effect.merged,
    )
    self._cluster.to_learner(effect.learner, effect.incarnation, message)

  def _take_fragment(self, effect: syncer_events.TakeFragment):
    p = effect.offered.fragment
    session = effect.learner, effect.incarnation
    order = self._order(p)

    def arrive():
      if not self.alive or not order():
        return
      here = self._cluster.reaches(*session) and not self._cluster.fails()
      crc = self._cluster.learners[effect.learner].contents.crcs[p]
      if here and crc == effect.crc:
        offered = effect.offered
        self._donated[p, session] = offered.version, offered.payload.data, crc
        self.deliver(syncer_events.FragmentTaken(p, *session))
      else:
        self.deliver(
          syncer_events.FragmentFailed(p, *session, 'lost on the way')
        )

    sim, pulled = self._cluster.sim, (effect.learner, SYNCER, Cargo.FRAGMENT, p)
    sim.at(self._cluster.wires.arrival_s(sim.now, *pulled), arrive)

  def _pull(self, effect: syncer_events.Pull):
    """Pulls bytes, which arrive even if the offer is withdrawn meanwhile.

    Bytes of a stopped or silent process wait until it resumes, or time out.
    """
    cluster, offer = self._cluster, effect.offer
    process = cluster.learners[effect.learner]
    session, handle = (effect.learner, effect.incarnation), offer.payload.handle
    key = pull_key(effect.round, *session, handle)
    self._pulling.add(key)
    order = self._order(offer.fragment)
    began_s = self.now
    arrival_s = cluster.wires.arrival_s(
      began_s, effect.learner, SYNCER, Cargo.OFFER, offer.fragment
    )
    usual_s, late_s = arrival_s - began_s, cluster.draw_late_s()

    def when_it_runs(callback: Callable[[], None]):
      if process.stopped or cluster.is_silent(effect.learner):
        longest_s = timeouts.TRANSFER_FACTOR * usual_s
        limit_s = max(timeouts.TRANSFER_FLOOR_S, longest_s)
        limit_s *= cluster.config.patience
        cluster.sim.at(max(began_s + limit_s, self.now), time_out)
      cluster.when_reached(process, callback)

    def begin():
      available = cluster.reaches(*session) and handle in process.offers
      if available:
        del process.offers[handle]  # An offer can be pulled once.
      cluster.sim.at(
        max(arrival_s, self.now) + late_s,
        lambda: when_it_runs(lambda: arrive(available)),
      )

    def arrive(available: bool):
      if self._ends(key, order):
        here = available and cluster.reaches(*session) and not cluster.fails()
        self._take(effect, process, key, here)

    def time_out():
      if self._ends(key, order):
        failed = effect.round, *session, handle, 'timed out', False
        self.deliver(syncer_events.PullFailed(*failed))

    when_it_runs(begin)

  def _ends(self, key: PullKey, order: Callable[[], bool]) -> bool:
    """Returns True if the machine still waits for a pull that is now over."""
    wanted = key in self._pulling
    self._pulling.discard(key)
    # It is told of a shard's death, and expects nothing more.
    return wanted and order()

  def _take(
    self, effect: syncer_events.Pull, process, key: PullKey, here: bool
  ):
    handle = effect.offer.payload.handle
    pull = effect.round, effect.learner, effect.incarnation, handle
    if not here:
      self.deliver(syncer_events.PullFailed(*pull, 'lost on the way', False))
      return
    try:
      taken, norm = self.contents.take(effect.offer)
      if process.unusable:
        raise RefusedContribution('not finite')
    except RefusedContribution as error:
      self.deliver(syncer_events.PullFailed(*pull, str(error), True))
      return
    self._taken[key] = taken
    self.deliver(syncer_events.Pulled(*pull, process.stretch * norm))
