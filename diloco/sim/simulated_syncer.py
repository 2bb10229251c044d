# SPDX-License-Identifier: Apache-2.0
"""One process of the syncer in a simulated cluster, around the real machine."""

import dataclasses
from collections.abc import Callable
from typing import Any

from diloco.protocol import messages, syncer_io
from diloco.protocol.syncer import Syncer
from diloco.sim.alarm import Alarm
from diloco.sim.contents import FINGERPRINTS, RUN, Carried, Unusable
from diloco.sim.disk import Disk
from diloco.sim.wires import SYNCER, Cargo


class SimulatedSyncer:
  """The machine, what stands for Θ, and the disk that it writes to.

  Args:
    cluster: that it is part of.
    disk: of the process before it, if any.
  """

  def __init__(self, cluster, disk: Disk | None):
    self.alive = True
    self.stopped = False
    self.disk = disk
    self._cluster = cluster
    self._unread: list[syncer_io.Event] = []  # While it is stopped.
    self._taken: dict[tuple[int, int], Any] = {}  # By round and learner.
    self._alarm = Alarm(
      cluster.sim,
      lambda: self.machine.deadline() if self.alive else None,
      lambda: self.deliver(syncer_io.Tick()),
    )
    run = cluster.config, RUN, FINGERPRINTS
    if disk is None:
      self.contents = cluster.contents.syncer(cluster.contents.first_crcs, None)
      self.machine = Syncer(*run)
    else:
      self.contents = cluster.contents.syncer(disk.held_crcs, disk.saved)
      self.machine = Syncer.resume(*run, disk.ledger, disk.held, disk.crcs)

  @property
  def crcs(self) -> list[int]:
    """Of Θ, by fragment."""
    return self.contents.crcs

  @property
  def now(self) -> float:
    return self._cluster.sim.now

  def deliver(self, event: syncer_io.Event):
    """One event: effects performed, the next wake-up set."""
    if not self.alive:
      return
    if self.stopped:
      self._unread.append(event)
      return
    effects = self.machine.handle(event, self._cluster.sim.now)
    self._cluster.watch.at_syncer(self, event, effects)
    for effect in effects:
      self._perform(effect)
    self._alarm.set()

  def resume(self):
    """Reads what came while it was stopped."""
    self.stopped = False
    unread, self._unread = self._unread, []
    for event in unread:
      self.deliver(event)

  def _later(self, delay_s: float, event: syncer_io.Event):
    """An event that this process makes for itself; it may die before."""
    self._cluster.sim.after(delay_s, lambda: self.deliver(event))

  def _perform(self, effect: syncer_io.Effect):
    cluster = self._cluster
    match effect:
      case syncer_io.Greet():
        self._greet(effect)
      case syncer_io.Send():
        cluster.to_learner(effect.learner, effect.incarnation, effect.message)
      case syncer_io.Drop():
        cluster.drop(effect)
      case syncer_io.Pull():
        self._pull(effect)
      case syncer_io.Merge():
        self._merge(effect)
      case syncer_io.Publish():
        self._publish(effect)
      case syncer_io.Serve():
        self._serve(effect)
      case syncer_io.TakeFragment():
        self._take_fragment(effect)
      case syncer_io.End():
        self._write_ledger()
        cluster.ended = effect
      case syncer_io.Relabel():
        p = effect.fragment
        self.contents.relabel(p, effect.version)
        cluster.watch.theta(p, effect.version, self.crcs[p])
      case syncer_io.Retire() | syncer_io.Record():
        pass  # No bytes are held here, no tape is written.
      case _:
        raise TypeError(f'Not a syncer effect: {effect!r}.')

  def _greet(self, effect: syncer_io.Greet):
    crcs = dict(enumerate(self.crcs)) | dict(effect.lost_crcs)
    welcome = messages.Welcome(
      effect.step,
      effect.closed_round,
      effect.versions,
      tuple(crcs.values()),
      effect.position,
      effect.live,
      effect.clean,
      ('syncer',),
    )
    self._cluster.to_learner(effect.learner, effect.incarnation, welcome)

  def _merge(self, effect: syncer_io.Merge):
    merged = {
      s.learner: self._taken[effect.round, s.learner] for s in effect.shares
    }
    self._taken = {
      key: x for key, x in self._taken.items() if key[0] > effect.round
    }
    self.contents.merge(effect, merged)
    self._later(self._cluster.timing.merge_s, syncer_io.Merged(effect.round))

  def _publish(self, effect: syncer_io.Publish):
    """First what must not be forgotten, then what others will know of."""
    p = effect.fragment
    data = self.contents.publish(p, effect.version)
    self._cluster.watch.theta(p, effect.version, self.crcs[p])
    self._write_ledger(checkpoint=self._cluster.is_checkpoint(effect.round))
    update = messages.Update(
      round=effect.round,
      fragment=p,
      version=effect.version,
      step=effect.step,
      participants=tuple(s.learner for s in effect.shares),
      weights=tuple(s.weight for s in effect.shares),
      ages_s=tuple(s.age_s for s in effect.shares),
      payload=Carried(self._cluster.next_handle(), 'down', 1, 0, data=data),
      crc=self.crcs[p],
    )
    for learner, incarnation in effect.recipients:
      self._cluster.to_learner(learner, incarnation, update)

  def _write_ledger(self, checkpoint: bool = False):
    ledger, crcs = self.machine.ledger(), tuple(self.crcs)
    if checkpoint:
      saved = self.contents.save()
      self.disk = Disk(ledger, crcs, ledger.versions, crcs, saved)
    elif self.disk is None:
      first = self._cluster.contents.first_crcs
      self.disk = Disk(ledger, crcs, (0,) * len(first), first, None)
    else:
      self.disk = dataclasses.replace(self.disk, ledger=ledger, crcs=crcs)

  def _serve(self, effect: syncer_io.Serve):
    message = messages.FullFragment(
      effect.fragment,
      self.machine.snapshot().versions[effect.fragment],
      Carried(
        self._cluster.next_handle(),
        'f32',
        1,
        0,
        data=self.contents.fragment(effect.fragment),
      ),
      self.crcs[effect.fragment],
    )
    self._cluster.to_learner(effect.learner, effect.incarnation, message)

  def _take_fragment(self, effect: syncer_io.TakeFragment):
    p = effect.offered.fragment
    session = effect.learner, effect.incarnation

    def arrive():
      if not self.alive:
        return
      here = self._cluster.reaches(*session) and not self._cluster.fails()
      crc = self._cluster.learners[effect.learner].contents.crcs[p]
      if here and crc == effect.crc:
        offered = effect.offered
        self.contents.take_fragment(
          p, offered.version, offered.payload.data, crc
        )
        self.deliver(syncer_io.FragmentTaken(p, *session))
      else:
        self.deliver(syncer_io.FragmentFailed(p, *session, 'lost on the way'))

    self._when_pulled(effect.learner, Cargo.FRAGMENT, p, arrive)

  def _pull(self, effect: syncer_io.Pull):
    cluster = self._cluster
    session = effect.round, effect.learner, effect.incarnation

    def arrive():
      process = cluster.learners[effect.learner]
      here = cluster.reaches(effect.learner, effect.incarnation)
      handle = effect.offer.payload.handle
      if not here or handle not in process.offers or cluster.fails():
        failed = syncer_io.PullFailed(*session, 'lost on the way', False)
        self.deliver(failed)
        return
      del process.offers[handle]
      try:
        taken, norm = self.contents.take(effect.offer)
        if process.unusable:
          raise Unusable('not finite')
      except Unusable as error:
        self.deliver(syncer_io.PullFailed(*session, str(error), True))
        return
      self._taken[effect.round, effect.learner] = taken
      self.deliver(syncer_io.Pulled(*session, process.stretch * norm))

    self._when_pulled(
      effect.learner, Cargo.OFFER, effect.offer.fragment, arrive
    )

  def _when_pulled(
    self, learner: int, cargo: Cargo, fragment: int, arrive: Callable[[], None]
  ):
    cluster = self._cluster
    wires, now_s = cluster.wires, cluster.sim.now
    cluster.sim.at(
      wires.arrival_s(now_s, learner, SYNCER, cargo, fragment), arrive
    )
