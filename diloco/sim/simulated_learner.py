# SPDX-License-Identifier: Apache-2.0
"""One learner's process in a simulated cluster, around the real machine."""

import dataclasses
from collections.abc import Callable

from diloco.protocol import learner_io, messages
from diloco.protocol.joining import Start
from diloco.protocol.learner import Learner
from diloco.sim.contents import (
  FINGERPRINTS,
  RUN,
  TOKENS_PER_STEP,
  crc_after,
  crc_of,
)


class SimulatedLearner:
  """The machine, its host's copy of Θ, its offers."""

  def __init__(self, cluster, learner: int):
    self.id = learner
    self.incarnation = 0
    self.alive = True
    self.stopped = False
    self.steps = 0
    self.tokens = 0
    self.position = 0
    self.training = False
    self.left: learner_io.Leave | None = None
    fragments = range(cluster.config.fragments)
    self.host_versions = [0 for _ in fragments]
    self.host_crcs = [crc_of(p, 0) for p in fragments]
    self.machine = Learner(
      cluster.config,
      RUN,
      learner,
      FINGERPRINTS,
      Start.from_seed(tuple(self.host_crcs)),
    )
    self.offers: dict[int, messages.Payload] = {}
    self.donations: dict[tuple[int, int], messages.StateOffered] = {}
    self._cluster = cluster
    self._free_at = 0.0  # When the encoding thread is.
    self._stepping = False

  def handle(self, event: learner_io.Event):
    """Feeds the machine and performs what it wants."""
    if not self.alive or self.left:
      return
    sim = self._cluster.sim
    for effect in self.machine.handle(event, sim.now):
      self._perform(effect)
    deadline = self.machine.deadline()
    if deadline is not None:
      sim.at(max(deadline, sim.now), self._tick)
    self._go_on()

  def _tick(self):
    deadline = self.machine.deadline()
    if deadline is not None and deadline <= self._cluster.sim.now:
      if self.stopped:
        self._cluster.sim.after(self._cluster.timing.latency_s, self._tick)
      else:
        self.handle(learner_io.Tick())

  def connect(self):
    """Opens a session; whatever an older one was told is void."""
    if not self.alive or self.left:
      return
    if self.stopped or not self._cluster.reaches_syncer(self.id):
      timing = self._cluster.timing
      self._cluster.sim.after(timing.reconnect_s, self.connect)
      return
    self.incarnation = self._cluster.next_incarnation()
    self.offers.clear()
    self.donations.clear()
    address = f'learner-{self.id}'
    self.handle(learner_io.Connected(self.incarnation, address))

  def disconnect(self, reason: str):
    self.handle(learner_io.Disconnected(reason))
    self._cluster.sim.after(self._cluster.timing.reconnect_s, self.connect)

  def _go_on(self):
    """Starts the next inner step unless one runs or the loop must wait."""
    idle = self.training and not self._stepping and not self.machine.waiting
    if idle and self.alive and not self.left:
      self._stepping = True
      step_s = self._cluster.draw_step_s(self.id)
      self._cluster.sim.after(step_s, lambda: self._stepped(step_s))

  def _stepped(self, step_s: float):
    self._stepping = False
    if not self.alive or self.left:
      return
    if self.stopped:
      self._stepping = True
      self._cluster.sim.after(step_s, lambda: self._stepped(step_s))
      return
    if not self.training:
      return
    self.steps += 1
    self.position += 1
    self.tokens += TOKENS_PER_STEP
    self.handle(learner_io.Boundary(TOKENS_PER_STEP))
    done = learner_io.Completed(
      TOKENS_PER_STEP, self.position, step_s, 0.0, 1.0
    )
    self.handle(done)

  def _perform(self, effect: learner_io.Effect):
    cluster = self._cluster
    match effect:
      case learner_io.Send():
        cluster.to_syncer(self, effect.message)
      case learner_io.Snapshot():
        self._later(lambda: self._offer(effect))
      case learner_io.HandIn():
        self._later(lambda: cluster.to_syncer(self, messages.HandedIn()))
      case learner_io.SayLeaving():
        self._later(lambda: cluster.to_syncer(self, messages.Leaving()))
      case learner_io.DonateState():
        self._later(lambda: self._donate(effect))
      case learner_io.EndDonation():
        self.donations.pop((effect.learner, effect.incarnation), None)
      case learner_io.DonateFragment():
        self._donate_fragment(effect)
      case learner_io.FetchState():
        self._fetch_state(effect.state)
      case learner_io.FetchUpdate():
        self._fetch_update(effect.update)
      case learner_io.FetchFragment():
        self._fetch_fragment(effect.message)
      case learner_io.Forget():
        gone = self.offers if effect.handles is None else effect.handles
        for handle in list(gone):
          self.offers.pop(handle, None)
        if effect.handles is None:
          self.donations.clear()
      case learner_io.Begin():
        self.training = True
        self.position = effect.position
        cluster.began(self)
      case learner_io.Cease():
        self.training = False
      case learner_io.Leave():
        self.left = effect
        cluster.lost(self, effect.reason)
      case learner_io.Apply():
        cluster.applied(self, effect)
      case learner_io.Adopt() | learner_io.Reset():
        pass  # No moments are held here.
      case _:
        raise TypeError(f'Not a learner effect: {effect!r}.')

  def _later(self, callback: Callable[[], None]):
    """Queues work on the one encoding thread."""
    sim = self._cluster.sim
    incarnation = self.incarnation
    self._free_at = max(self._free_at, sim.now) + self._cluster.timing.encode_s

    def encoded():
      if self.alive and self.incarnation == incarnation:
        callback()

    sim.at(self._free_at, encoded)

  def _offer(self, snapshot: learner_io.Snapshot):
    handle = self._cluster.next_handle()
    payload = messages.Payload(handle, 'int4', 1, 0)
    self.offers[handle] = payload
    fields = dataclasses.asdict(snapshot)
    self._cluster.to_syncer(self, messages.Offer(**fields, payload=payload))

  def _donate(self, effect: learner_io.DonateState):
    offered = messages.StateOffered(
      learner=effect.learner,
      incarnation=effect.incarnation,
      versions=tuple(self.host_versions),
      crcs=tuple(self.host_crcs),
      step=effect.step,
      payloads=tuple(
        messages.Payload(self._cluster.next_handle(), 'f32', 1, 0)
        for _ in self.host_versions
      ),
      address=f'learner-{self.id}',
    )
    self.donations[effect.learner, effect.incarnation] = offered
    self._cluster.to_syncer(self, offered)

  def _donate_fragment(self, effect: learner_io.DonateFragment):
    p = effect.fragment
    payload = messages.Payload(self._cluster.next_handle(), 'f32', 1, 0)
    self.offers[payload.handle] = payload
    offered = messages.FragmentOffered(p, self.host_versions[p], payload)
    self._later(lambda: self._cluster.to_syncer(self, offered))

  def _fetch_state(self, state: messages.StateAt):
    session = self.id, self.incarnation

    def arrive():
      donor = self._cluster.learners[state.donor]
      here = self._cluster.reaches(state.donor, state.incarnation)
      if self.stopped or self._cluster.fails() or not here:
        self.handle(learner_io.StateFailed('lost on the way'))
      elif session not in donor.donations:
        self.handle(learner_io.StateFailed('not offered'))
      elif session == (self.id, self.incarnation):
        offered = donor.donations[session]
        self.host_versions = list(offered.versions)
        self.host_crcs = list(offered.crcs)
        self.handle(learner_io.StateFetched(offered, state.donor))

    self._cluster.sim.after(4 * self._cluster.timing.transfer_s, arrive)

  def _fetch_update(self, update: messages.Update):
    p, version = update.fragment, update.version

    def rebuild() -> str | None:
      if self.host_versions[p] != version - 1:
        return f'host has version {self.host_versions[p]}'
      if crc_after(self.host_crcs[p], version) != update.crc:
        return f'another CRC at version {version}'
      return None

    self._fetch(update, rebuild)

  def _fetch_fragment(self, message: messages.FullFragment):
    self._fetch(message, lambda: None)

  def _fetch(self, message, why_not: Callable[[], str | None]):
    p, version = message.fragment, message.version
    starts = self._cluster.syncer_starts

    def arrive():
      gone = starts != self._cluster.syncer_starts
      here = self._cluster.reaches_syncer(self.id) and not self.stopped
      if gone or not here or self._cluster.fails():
        self.handle(learner_io.FetchFailed(p, version, 'lost on the way'))
        return
      reason = why_not()
      if reason is not None:
        self.handle(learner_io.FetchFailed(p, version, reason))
        return
      if version >= self.host_versions[p]:
        self.host_versions[p], self.host_crcs[p] = version, message.crc
      handle = message.payload.handle
      self.handle(learner_io.Rebuilt(p, version, message.crc, handle))

    self._cluster.sim.after(self._cluster.timing.transfer_s, arrive)
