# SPDX-License-Identifier: Apache-2.0
"""Real syncer and learner machines in a simulated cluster, without arrays.

Messages take a latency, bytes a transfer time; whatever is on its way to a
dead process is lost. Nothing here decides anything: that is the machines'
part. The learners' side is in `simulated_learner`.
"""

import dataclasses
import random
from collections.abc import Callable

from diloco.protocol import learner_io, messages, syncer_io
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.state import Ledger
from diloco.protocol.syncer import Syncer
from diloco.sim.contents import FINGERPRINTS, RUN, crc_after, crc_of
from diloco.sim.engine import Simulation
from diloco.sim.simulated_learner import SimulatedLearner


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


@dataclasses.dataclass(frozen=True)
class Disk:
  """What a dead syncer leaves: the ledger, and an older checkpoint."""

  ledger: Ledger
  crcs: tuple[int, ...]  # At the ledger's versions.
  held: tuple[int, ...]  # Versions in the checkpoint,
  held_crcs: tuple[int, ...]  # and their CRCs.


class Cluster:
  """One syncer and its learners under one simulated clock.

  Args:
    config: of the protocol.
    timing: how long things take.
    seed: of the step lengths and of lost transfers.
    loss: probability that a transfer of bytes fails.
    observe: called with every event and its effects at the syncer.
    checkpoint_rounds: closes between two checkpoints of the syncer.
  """

  def __init__(
    self,
    config: ProtocolConfig,
    timing: Timing,
    seed: int,
    loss: float = 0.0,
    observe: Callable[[object, list], None] = lambda event, effects: None,
    checkpoint_rounds: int = 1,
  ):
    self.config = config
    self.timing = timing
    self.sim = Simulation()
    self.syncer: Syncer | None = Syncer(config, RUN, FINGERPRINTS)
    self.learners: dict[int, SimulatedLearner] = {}
    self.merges: list[tuple[float, syncer_io.Merge]] = []
    self.records: list[tuple[float, syncer_io.Record]] = []
    self.applies: list[tuple[float, int, learner_io.Apply]] = []
    self.begins: list[tuple[float, int, int]] = []
    self.ended: syncer_io.End | None = None
    self.loss = loss
    self.syncer_starts = 1
    self.disk: Disk | None = None
    self.crcs = [crc_of(p, 0) for p in range(config.fragments)]
    self.cut: set[int] = set()  # Learners that no message reaches or leaves.
    self._random = random.Random(seed)
    self._observe = observe
    self._checkpoint_rounds = checkpoint_rounds
    self._incarnations = 0
    self._handles = 0

  # What a scenario does -----------------------------------------------------

  def start(self, learner: int):
    """Starts a process for `learner`, in place of a dead one if need be."""
    old = self.learners.get(learner)
    assert old is None or not old.alive, f'learner {learner} is alive'
    process = SimulatedLearner(self, learner)
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

  def preempt(self, learner: int, notice_s: float):
    """SIGTERM: leaves in good order, as far as the time allows."""
    self.learners[learner].handle(learner_io.Stop(notice_s))

  def partition(self, learner: int):
    """The network between a learner and everybody else goes away."""
    self.cut.add(learner)
    process = self.learners[learner]
    self.lost(process, 'unreachable', through_the_cut=True)
    self._disconnect_later(process)

  def heal(self, learner: int):
    self.cut.discard(learner)

  def kill_syncer(self):
    """kill -9; what it had written stays."""
    assert self.syncer is not None, 'the syncer is dead'
    self.syncer = None
    for process in self.learners.values():
      self._disconnect_later(process)

  def start_syncer(self):
    """A new process of the syncer goes on from the disk."""
    assert self.syncer is None, 'the syncer is alive'
    self.syncer_starts += 1
    if self.disk is None:
      self.crcs = [crc_of(p, 0) for p in range(self.config.fragments)]
      self.syncer = Syncer(self.config, RUN, FINGERPRINTS)
    else:
      disk = self.disk
      self.crcs = list(disk.held_crcs)
      self.syncer = Syncer.resume(
        self.config, RUN, FINGERPRINTS, disk.ledger, disk.held, disk.crcs
      )

  def run(self, until: float):
    """Runs up to a time, or to the end of the run."""
    self.sim.run(until, stop=lambda: self.ended is not None)

  # What the machines want ---------------------------------------------------

  def to_syncer(self, process: SimulatedLearner, message):
    incarnation, starts = process.incarnation, self.syncer_starts
    event = syncer_io.Heard(process.id, incarnation, message)

    def arrive():
      if starts == self.syncer_starts and process.id not in self.cut:
        self.deliver(event)

    self.sim.after(self.timing.latency_s, arrive)

  def reaches_syncer(self, learner: int) -> bool:
    return self.syncer is not None and learner not in self.cut

  def lost(
    self, process: SimulatedLearner, reason: str, through_the_cut: bool = False
  ):
    event = syncer_io.Lost(process.id, process.incarnation, reason)
    starts = self.syncer_starts

    def arrive():
      if starts == self.syncer_starts:
        if through_the_cut or process.id not in self.cut:
          self.deliver(event)

    self.sim.after(self.timing.latency_s, arrive)

  def deliver(self, event: syncer_io.Event):
    """One event at the syncer: effects performed, the next wake-up set."""
    if self.ended or self.syncer is None:
      return
    effects = self.syncer.handle(event, self.sim.now)
    self._observe(event, effects)
    for effect in effects:
      self._perform(effect)
    deadline = self.syncer.deadline()
    if deadline is not None:
      self.sim.at(max(deadline, self.sim.now), self._tick)

  def began(self, process: SimulatedLearner):
    self.begins.append((self.sim.now, process.id, process.position))

  def applied(self, process: SimulatedLearner, effect: learner_io.Apply):
    self.applies.append((self.sim.now, process.id, effect))

  def _tick(self):
    deadline = self.syncer.deadline() if self.syncer else None
    if deadline is not None and deadline <= self.sim.now:
      self.deliver(syncer_io.Tick())

  def _later(self, delay_s: float, event: syncer_io.Event):
    """An event that this process of the syncer makes for itself."""
    starts = self.syncer_starts

    def arrive():
      if starts == self.syncer_starts:
        self.deliver(event)

    self.sim.after(delay_s, arrive)

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
        self._later(self.timing.merge_s, syncer_io.Merged(effect.round))
      case syncer_io.Publish():
        self._publish(effect)
      case syncer_io.Serve():
        self._serve(effect)
      case syncer_io.TakeFragment():
        self._take_fragment(effect)
      case syncer_io.Relabel():
        pass  # The bytes that are here go on under another number.
      case syncer_io.Record():
        self.records.append((self.sim.now, effect))
      case syncer_io.End():
        self.ended = effect
      case syncer_io.Retire():
        pass  # No bytes are held here.
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
      'syncer',
    )
    self._to_learner(effect.learner, effect.incarnation, welcome)

  def _publish(self, effect: syncer_io.Publish):
    """First what must not be forgotten, then what others will know of."""
    p = effect.fragment
    self.crcs[p] = crc_after(self.crcs[p], effect.version)
    ledger, crcs = self.syncer.ledger(), tuple(self.crcs)
    held, held_crcs = ledger.versions, crcs
    if self.disk and effect.round % self._checkpoint_rounds:
      held, held_crcs = self.disk.held, self.disk.held_crcs
    self.disk = Disk(ledger, crcs, held, held_crcs)
    update = messages.Update(
      round=effect.round,
      fragment=p,
      version=effect.version,
      step=effect.step,
      participants=tuple(s.learner for s in effect.shares),
      weights=tuple(s.weight for s in effect.shares),
      ages_s=tuple(s.age_s for s in effect.shares),
      payload=messages.Payload(self.next_handle(), 'int4', 1, 0),
      crc=self.crcs[p],
    )
    for learner, incarnation in effect.recipients:
      self._to_learner(learner, incarnation, update)

  def _serve(self, effect: syncer_io.Serve):
    version = self.syncer.snapshot().versions[effect.fragment]
    message = messages.FullFragment(
      effect.fragment,
      version,
      messages.Payload(self.next_handle(), 'f32', 1, 0),
      self.crcs[effect.fragment],
    )
    self._to_learner(effect.learner, effect.incarnation, message)

  def reaches(self, learner: int, incarnation: int) -> bool:
    """Whether bytes can be pulled from a session's process now."""
    process = self.learners[learner]
    here = process.alive and not process.stopped and learner not in self.cut
    return here and process.incarnation == incarnation

  def _take_fragment(self, effect: syncer_io.TakeFragment):
    p = effect.offered.fragment
    session = effect.learner, effect.incarnation
    starts = self.syncer_starts

    def arrive():
      if starts != self.syncer_starts:
        return
      here = self.reaches(*session) and not self.fails()
      crc = self.learners[effect.learner].host_crcs[p]
      if here and crc == effect.crc:
        self.crcs[p] = crc
        self.deliver(syncer_io.FragmentTaken(p))
      else:
        self.deliver(syncer_io.FragmentFailed(p, *session, 'lost on the way'))

    self.sim.after(self.timing.latency_s + self.timing.transfer_s, arrive)

  def _pull(self, effect: syncer_io.Pull):
    session = effect.round, effect.learner, effect.incarnation
    starts = self.syncer_starts

    def arrive():
      if starts != self.syncer_starts:
        return
      process = self.learners[effect.learner]
      here = self.reaches(effect.learner, effect.incarnation)
      handle = effect.offer.payload.handle
      if here and handle in process.offers and not self.fails():
        del process.offers[handle]
        norm = effect.offer.c_steps**0.5
        self.deliver(syncer_io.Pulled(*session, norm))
      else:
        failed = syncer_io.PullFailed(*session, 'lost on the way', False)
        self.deliver(failed)

    self.sim.after(self.timing.latency_s + self.timing.transfer_s, arrive)

  def _to_learner(self, learner: int, incarnation: int, message):
    def arrive():
      process = self.learners[learner]
      if process.incarnation != incarnation or learner in self.cut:
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

  def _disconnect_later(self, process: SimulatedLearner):
    incarnation = process.incarnation

    def arrive():
      if process.stopped:
        self.sim.after(self.timing.latency_s, arrive)
      elif process.alive and process.incarnation == incarnation:
        process.disconnect('stream closed')

    self.sim.after(self.timing.latency_s, arrive)

  # Draws and numbers --------------------------------------------------------

  def draw_step_s(self, learner: int) -> float:
    mean_s = self.timing.step_s[learner]
    drawn_s = self._random.gauss(mean_s, self.timing.jitter * mean_s)
    return max(drawn_s, 0.1 * mean_s)

  def fails(self) -> bool:
    return self._random.random() < self.loss

  def next_incarnation(self) -> int:
    self._incarnations += 1
    return self._incarnations

  def next_handle(self) -> int:
    self._handles += 1
    return self._handles
