# SPDX-License-Identifier: Apache-2.0
"""Real syncer and learner machines in a simulated cluster, without arrays.

A simulated learner makes steps of drawn length; messages take a latency, bytes
a transfer time. Nothing here decides anything: that is the machines' part.
"""

import dataclasses
import random
from collections.abc import Callable

from diloco.protocol import learner_io, messages, syncer_io
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.learner import Learner
from diloco.protocol.syncer import Syncer
from diloco.sim.engine import Simulation

RUN = 'simulated'
FINGERPRINTS = {'config': 'c', 'layout': 'l', 'data': 'd'}
TOKENS_PER_STEP = 1024


@dataclasses.dataclass(frozen=True)
class Timing:
  """How long things take, in seconds.

  Attributes:
    step_s: of an inner step, by learner id.
    jitter: standard deviation of a step's length, as a share of it.
    latency_s: of a message, one way.
    transfer_s: of a fragment's bytes.
    encode_s: of a snapshot, from boundary to offer.
    merge_s: of the outer step.
    reconnect_s: from a lost stream to the next attempt.
  """

  step_s: dict[int, float]
  jitter: float = 0.0
  latency_s: float = 0.001
  transfer_s: float = 0.002
  encode_s: float = 0.002
  merge_s: float = 0.002
  reconnect_s: float = 0.2


def crc_of(fragment: int, version: int) -> int:
  """Stands for the bytes of Θ_p at a version, which nobody has here."""
  return 1000 * version + fragment


class SimulatedLearner:
  """One process: the machine, its host's copy of Θ, its offers."""

  def __init__(self, cluster: 'Cluster', learner: int, incarnation: int):
    self.id = learner
    self.incarnation = incarnation
    self.alive = True
    self.stopped = False
    self.steps = 0
    self.tokens = 0
    self.training = False
    self.left: learner_io.Leave | None = None
    config = cluster.config
    self.machine = Learner(
      config,
      RUN,
      learner,
      FINGERPRINTS,
      tuple(crc_of(p, 0) for p in range(config.fragments)),
    )
    self.host_versions = [0] * config.fragments
    self.offers: dict[int, messages.Payload] = {}
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
      self.handle(learner_io.Tick())

  def connect(self):
    """Opens a session; whatever an older one was told is void."""
    if self.alive and not self.left:
      self.incarnation = self._cluster.next_incarnation()
      self.offers.clear()
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
    if self.stopped:  # SIGSTOP: looks again when it may go on.
      self._stepping = True
      self._cluster.sim.after(step_s, lambda: self._stepped(step_s))
      return
    if not self.training:
      return
    self.steps += 1
    self.tokens += TOKENS_PER_STEP
    self.handle(learner_io.Boundary(TOKENS_PER_STEP))
    self.handle(
      learner_io.Completed(TOKENS_PER_STEP, self.steps, step_s, 0.0, 1.0)
    )

  def _perform(self, effect: learner_io.Effect):
    cluster = self._cluster
    match effect:
      case learner_io.Send():
        cluster.to_syncer(self, effect.message)
      case learner_io.Snapshot():
        self._later(lambda: self._offer(effect))
      case learner_io.HandIn():
        self._later(lambda: cluster.to_syncer(self, messages.HandedIn()))
      case learner_io.FetchUpdate():
        update = effect.update
        self._fetch(update, update.version, needs=update.version - 1)
      case learner_io.FetchFragment():
        self._fetch(effect.message, effect.message.version, needs=None)
      case learner_io.Forget():
        gone = self.offers if effect.handles is None else effect.handles
        for handle in list(gone):
          self.offers.pop(handle, None)
      case learner_io.Begin():
        self.training = True
      case learner_io.Cease():
        self.training = False
      case learner_io.Leave():
        self.left = effect
        cluster.lost(self, effect.reason)
      case learner_io.Apply():
        cluster.applied(self, effect)
      case _:
        raise TypeError(f'Not a learner effect: {effect!r}.')

  def _later(self, callback: Callable[[], None]):
    """Queues work on the one encoding thread."""
    sim = self._cluster.sim
    self._free_at = max(self._free_at, sim.now) + self._cluster.timing.encode_s
    sim.at(self._free_at, callback)

  def _offer(self, snapshot: learner_io.Snapshot):
    handle = self._cluster.next_handle()
    payload = messages.Payload(handle, 'int4', 1, 0)
    self.offers[handle] = payload
    fields = dataclasses.asdict(snapshot)
    self._cluster.to_syncer(self, messages.Offer(**fields, payload=payload))

  def _fetch(self, message, version: int, needs: int | None):
    def arrive():
      p = message.fragment
      held = self.host_versions[p]
      if self.stopped or self._cluster.fails():
        self.handle(learner_io.FetchFailed(p, version, 'lost on the way'))
      elif needs is not None and held != needs:
        reason = f'host has version {held}'
        self.handle(learner_io.FetchFailed(p, version, reason))
      else:
        self.host_versions[p] = max(held, version)
        handle = message.payload.handle
        crc = crc_of(p, version)
        self.handle(learner_io.Rebuilt(p, version, crc, handle))

    self._cluster.sim.after(self._cluster.timing.transfer_s, arrive)


class Cluster:
  """One syncer and its learners under one simulated clock.

  Args:
    config: of the protocol.
    timing: how long things take.
    seed: of the step lengths and of lost transfers.
    loss: probability that a transfer of bytes fails.
    observe: called with every event and its effects at the syncer.
  """

  def __init__(
    self,
    config: ProtocolConfig,
    timing: Timing,
    seed: int,
    loss: float = 0.0,
    observe: Callable[[object, list], None] = lambda event, effects: None,
  ):
    self.config = config
    self.timing = timing
    self.sim = Simulation()
    self.syncer = Syncer(config, RUN, FINGERPRINTS)
    self.learners: dict[int, SimulatedLearner] = {}
    self.merges: list[tuple[float, syncer_io.Merge]] = []
    self.records: list[tuple[float, syncer_io.Record]] = []
    self.applies: list[tuple[float, int, learner_io.Apply]] = []
    self.ended: syncer_io.End | None = None
    self._random = random.Random(seed)
    self._loss = loss
    self._observe = observe
    self._incarnations = 0
    self._handles = 0

  # What a scenario does -----------------------------------------------------

  def start(self, learner: int):
    """Starts a process for `learner`, in place of a dead one if need be."""
    old = self.learners.get(learner)
    assert old is None or not old.alive, f'learner {learner} is alive'
    process = SimulatedLearner(self, learner, 0)
    self.learners[learner] = process
    process.connect()

  def kill(self, learner: int):
    """kill -9: the stream breaks, nothing more is sent."""
    process = self.learners[learner]
    process.alive = False
    self.lost(process, 'stream closed')

  def stop(self, learner: int):
    """SIGSTOP: silent, but the stream stays open."""
    self.learners[learner].stopped = True

  def resume(self, learner: int):
    self.learners[learner].stopped = False

  def run(self, until: float):
    """Runs up to a time, or to the end of the run."""
    self.sim.run(until, stop=lambda: self.ended is not None)

  # What the machines want ---------------------------------------------------

  def to_syncer(self, process: SimulatedLearner, message):
    incarnation = process.incarnation
    event = syncer_io.Heard(process.id, incarnation, message)
    self.sim.after(self.timing.latency_s, lambda: self.deliver(event))

  def lost(self, process: SimulatedLearner, reason: str):
    event = syncer_io.Lost(process.id, process.incarnation, reason)
    self.sim.after(self.timing.latency_s, lambda: self.deliver(event))

  def deliver(self, event: syncer_io.Event):
    """One event at the syncer: effects performed, the next wake-up set."""
    if self.ended:
      return
    effects = self.syncer.handle(event, self.sim.now)
    self._observe(event, effects)
    for effect in effects:
      self._perform(effect)
    deadline = self.syncer.deadline()
    if deadline is not None:
      self.sim.at(max(deadline, self.sim.now), self._tick)

  def applied(self, process: SimulatedLearner, effect: learner_io.Apply):
    self.applies.append((self.sim.now, process.id, effect))

  def _tick(self):
    deadline = self.syncer.deadline()
    if deadline is not None and deadline <= self.sim.now:
      self.deliver(syncer_io.Tick())

  def _perform(self, effect: syncer_io.Effect):
    match effect:
      case syncer_io.Greet():
        self._greet(effect)
      case syncer_io.Send():
        self._to_learner(effect.learner, effect.incarnation, effect.message)
      case syncer_io.Drop():
        self._drop(effect)
      case syncer_io.Pull():
        self._pull(effect)
      case syncer_io.Merge():
        self.merges.append((self.sim.now, effect))
        done = syncer_io.Merged(effect.round)
        self.sim.after(self.timing.merge_s, lambda: self.deliver(done))
      case syncer_io.Publish():
        for learner, incarnation in effect.recipients:
          self._to_learner(learner, incarnation, self._update(effect))
      case syncer_io.Serve():
        self._serve(effect)
      case syncer_io.Record():
        self.records.append((self.sim.now, effect))
      case syncer_io.End():
        self.ended = effect
      case syncer_io.Retire():
        pass  # No bytes are held here.
      case _:
        raise TypeError(f'Not a syncer effect: {effect!r}.')

  def _greet(self, effect: syncer_io.Greet):
    welcome = messages.Welcome(
      effect.step,
      effect.closed_round,
      effect.versions,
      tuple(crc_of(p, v) for p, v in enumerate(effect.versions)),
      effect.position,
      effect.live,
      'syncer',
    )
    self._to_learner(effect.learner, effect.incarnation, welcome)

  def _update(self, effect: syncer_io.Publish) -> messages.Update:
    return messages.Update(
      round=effect.round,
      fragment=effect.fragment,
      version=effect.version,
      step=effect.step,
      participants=tuple(s.learner for s in effect.shares),
      weights=tuple(s.weight for s in effect.shares),
      ages_s=tuple(s.age_s for s in effect.shares),
      payload=messages.Payload(self.next_handle(), 'int4', 1, 0),
      crc=crc_of(effect.fragment, effect.version),
    )

  def _serve(self, effect: syncer_io.Serve):
    version = self.syncer.snapshot().versions[effect.fragment]
    message = messages.FullFragment(
      effect.fragment,
      version,
      messages.Payload(self.next_handle(), 'f32', 1, 0),
      crc_of(effect.fragment, version),
    )
    self._to_learner(effect.learner, effect.incarnation, message)

  def _pull(self, effect: syncer_io.Pull):
    session = effect.round, effect.learner, effect.incarnation

    def arrive():
      process = self.learners[effect.learner]
      here = process.alive and not process.stopped
      handle = effect.offer.payload.handle
      if here and handle in process.offers and not self.fails():
        del process.offers[handle]
        self.deliver(syncer_io.Pulled(*session))
      else:
        self.deliver(syncer_io.PullFailed(*session, 'lost on the way'))

    self.sim.after(self.timing.latency_s + self.timing.transfer_s, arrive)

  def _to_learner(self, learner: int, incarnation: int, message):
    def arrive():
      process = self.learners[learner]
      if process.incarnation != incarnation:
        return
      if process.stopped:  # It lies in the socket until the process goes on.
        self.sim.after(self.timing.latency_s, arrive)
        return
      process.handle(learner_io.Heard(message))

    self.sim.after(self.timing.latency_s, arrive)

  def _drop(self, effect: syncer_io.Drop):
    def arrive():
      process = self.learners[effect.learner]
      if process.stopped:
        self.sim.after(self.timing.latency_s, arrive)
      elif process.alive and process.incarnation == effect.incarnation:
        process.disconnect(effect.reason)

    self.sim.after(self.timing.latency_s, arrive)

  # Draws and numbers --------------------------------------------------------

  def draw_step_s(self, learner: int) -> float:
    mean_s = self.timing.step_s[learner]
    drawn_s = self._random.gauss(mean_s, self.timing.jitter * mean_s)
    return max(drawn_s, 0.1 * mean_s)

  def fails(self) -> bool:
    return self._random.random() < self._loss

  def next_incarnation(self) -> int:
    self._incarnations += 1
    return self._incarnations

  def next_handle(self) -> int:
    self._handles += 1
    return self._handles
