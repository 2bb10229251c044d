# SPDX-License-Identifier: Apache-2.0
"""Real syncer and learner machines in a simulated cluster, without arrays.

Messages take a latency, bytes a transfer time; whatever is being sent to a dead
process is lost. All decisions are the machines' own. The processes are in
`simulated_syncer` and `simulated_learner`.
"""

import collections
import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

from diloco.faults import WAYS
from diloco.protocol import messages
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner.bootstrap import Start
from diloco.protocol.syncer import events as syncer_events
from diloco.simulator.contents import Backend
from diloco.simulator.engine import Observer, Simulation
from diloco.simulator.network import USUAL, LinkDeviation, Links, UnequalWires
from diloco.simulator.simulated_learner import SESSION_BITS, SimulatedLearner
from diloco.simulator.simulated_syncer import (
  Disk,
  SimulatedShard,
  SimulatedSyncer,
)

EPOCH_S = 1e6  # The time of a correct clock at the start of a simulation.
KEEPALIVE_S = 5.0  # After this, silence breaks a stream on both sides.


@dataclasses.dataclass(frozen=True)
class Timing:
  """Durations, in seconds.

  Attributes:
    step_s: an inner step, by learner id.
    jitter: standard deviation of a step's length, as a share of it.
    latency_s: a message, one way.
    transfer_s: a fragment's bytes.
    encode_s: a snapshot, from boundary to offer.
    merge_s: the outer step.
    reconnect_s: from a lost stream to the next attempt.
    slow_share: share of the steps that take three times as long.
    links: links that differ from the usual one, by learner id.
    late_share: share of the syncer's pulls that take `late_s` more, and
      succeed.
    late_s: see `late_share`.
  """

  step_s: dict[int, float]
  jitter: float = 0.0
  latency_s: float = 0.001
  transfer_s: float = 0.002
  encode_s: float = 0.002
  merge_s: float = 0.002
  reconnect_s: float = 0.2
  slow_share: float = 0.0
  late_share: float = 0.0
  late_s: float = 0.0
  links: Mapping[int, LinkDeviation] = dataclasses.field(default_factory=dict)

  def up_s(self, learner: int) -> float:
    """Returns the latency of a message to the syncer."""
    return self.latency_s + self.links.get(learner, USUAL).up_s

  def down_s(self, learner: int) -> float:
    """Returns the latency of a message from the syncer."""
    return self.latency_s + self.links.get(learner, USUAL).down_s


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
  """The settings of a cluster besides its protocol and its durations.

  Attributes:
    loss: probability that a transfer of bytes fails.
    checkpoint_rounds: closes between two checkpoints of the syncer.
    checkpoint_steps: steps between a learner's own checkpoints; None: none.
    wires: carry the bytes; None: `timing.transfer_s` for each transfer.
    speeds: by learner, the length of a step that begins at a time; None: drawn
      according to `timing`.
    batch_of: rows of a step, by learner and number of its process, from 0.
    row_tokens: L.
    shards: S, the processes of the syncer; more than 1 with symbols only.
    slices: slices of each learner that has several, by id; `batch_of` is then
      that of a slice.
    slice_copy_steps: steps between two boundaries that these keep.
    reform_s: from the end of a world of slices to the hello of the next, by how
      many the learner has had before.
  """

  loss: float = 0.0
  checkpoint_rounds: int = 1
  checkpoint_steps: int | None = None
  wires: UnequalWires | Links | None = None
  speeds: Mapping[int, Callable[[float], float]] | None = None
  batch_of: Callable[[int, int], int] = lambda learner, process: 8
  row_tokens: int = 128
  shards: int = 1
  slices: Mapping[int, int] = dataclasses.field(default_factory=dict)
  slice_copy_steps: int = 1
  reform_s: Callable[[int], float] = lambda before: 0.5


USUAL_OPTIONS = ClusterOptions()


@dataclasses.dataclass(frozen=True)
class SavedCluster:
  """A checkpoint of all processes at one moment, and the counters."""

  now_s: float
  disk: Disk  # The syncer's, with the fragments of this moment.
  learners: Mapping[int, tuple[Start, Any]]  # Those that were training.
  incarnations: int
  handles: int


class Cluster:
  """One syncer and its learners under one simulated clock.

  Args:
    timing: durations.
    seed: seed of step lengths and lost transfers.
    observer: observer of every event and its effects.
    contents: what the processes hold; None: symbols.
    saved: of an earlier cluster, which this one goes on from: its syncer has
      started, its learners have not.

  Attributes:
    resting: True if no learner begins another step.
    partitions: how learners of several hosts share their state, by id.
    disk_full: True if the syncer cannot write its ledger.
    clocks_s: error of each learner's clock, by id; None: an incarnation is a
      number that rises across all learners.
  """

  def __init__(
    self,
    config: ProtocolConfig,
    timing: Timing,
    seed: int,
    observer: Observer | None = None,
    contents: Backend | None = None,
    options: ClusterOptions = USUAL_OPTIONS,
    saved: SavedCluster | None = None,
  ):
    self.config = config
    self.timing = timing
    self.options = options
    self.loss = options.loss
    self.observer = observer or Observer()
    self.wires = options.wires or UnequalWires(
      timing.transfer_s, timing.latency_s
    )
    self.contents = contents or Backend(config.fragments)
    self.sim = Simulation(saved.now_s if saved else 0.0)
    self.learners: dict[int, SimulatedLearner] = {}
    # Learners' own checkpoints, and their saved contents.
    self.saved: dict[int, tuple[Start, Any]] = (
      dict(saved.learners) if saved else {}
    )
    self.ended: syncer_events.End | None = None
    self.cut: set[int] = set()  # Learners that no message reaches or leaves.
    # Messages held back by a silent link without a closed stream, by way.
    self.silent: dict[tuple[int, str], list[Callable[[], None]]] = {}
    self.partitions: Mapping[int, str] = {}
    self.live_slices = dict(options.slices)  # That take part, by learner.
    self._reformed: collections.Counter[int] = collections.Counter()
    # Boundaries that slices go on from, by learner.
    self._held: dict[int, tuple[Start, Any]] = {}
    self.disk_full = False
    self.resting = False
    self.clocks_s: dict[int, float] | None = None
    self._random = random.Random(seed)
    # A separate generator, so that a seed's other draws are unaffected.
    self._late_random = random.Random(f'late {seed}')
    self._incarnations = saved.incarnations if saved else 0
    self._handles = saved.handles if saved else 0
    self._started: collections.Counter[int] = collections.Counter()
    self.shards = options.shards
    self.others = {s: SimulatedShard(self, s) for s in range(1, self.shards)}
    self.syncer = SimulatedSyncer(self, saved.disk if saved else None)
    self._syncer_started()

  # What a scenario does -----------------------------------------------------

  def start(self, learner: int):
    """Starts a process for `learner`, replacing a dead one."""
    old = self.learners.get(learner)
    assert old is None or old.gone, f'learner {learner} is alive'
    held = self._held.pop(learner, None)
    slices = self.options.slices.get(learner, 1)
    if held is None:  # Whatever it was, all of it starts.
      self.live_slices[learner] = slices
    else:
      old.handed_on = True
      saved, _ = self.saved.get(learner, held)
      if saved.step > held[0].step:  # It is of steps that are lost.
        del self.saved[learner]
    process = SimulatedLearner(
      self,
      learner,
      *(held or self.saved.get(learner, (None, None))),
      messages.World(self.live_slices[learner], slices, held is not None),
    )
    self.learners[learner] = process
    self._started[learner] += 1
    process.connect()

  def kill(self, learner: int):
    """Simulates kill -9: the stream breaks, nothing more is sent."""
    process = self.learners[learner]
    process.alive = False
    self.lost(process, 'stream closed')

  def reform(self, learner: int, slices: int):
    """Simulates a learner that goes on with so many of its slices.

    If it holds no boundary yet, or no slice is left, it is a death.
    """
    process = self.learners[learner]
    held = process.held()
    self.kill(learner)
    if held is None or not slices:
      return
    self._held[learner] = held
    self.live_slices[learner] = slices

    def start():
      if self.learners[learner] is process:
        self.start(learner)

    pause_s = self.options.reform_s(self._reformed[learner])
    self._reformed[learner] += 1
    self.sim.after(pause_s, start)

  def stop(self, learner: int):
    """Simulates SIGSTOP: silent, but the stream stays open."""
    self.learners[learner].stopped = True

  def resume(self, learner: int):
    """Simulates SIGCONT: what lay in the socket is read now."""
    self.learners[learner].resume()

  def preempt(self, learner: int, notice_s: float, kills: bool = False):
    """Simulates SIGTERM: the learner leaves in good order, if time allows.

    Args:
      notice_s: the notice time that it is told.
      kills: True if SIGKILL follows then.
    """
    process = self.learners[learner]
    process.when_it_runs(lambda: process.handle(learner_events.Stop(notice_s)))

    def over():
      if self.learners[learner] is process and not process.gone:
        self.kill(learner)

    if kills:
      self.sim.after(notice_s, over)

  def spoil(self, learner: int, stretch: float = 1.0, unusable: bool = False):
    """Makes what this process offers from now on too long, or unusable."""
    process = self.learners[learner]
    process.stretch, process.unusable = stretch, unusable

  def partition(self, learner: int):
    """Cuts a learner off from all other processes."""
    self.cut.add(learner)
    process = self.learners[learner]
    self.lost(process, 'unreachable', through_the_cut=True)
    self._disconnect(process, 'unreachable')

  def heal(self, learner: int):
    self.cut.discard(learner)

  def silence(self, learner: int, ways: tuple[str, ...]):
    """Drops bytes on these ways; streams notice only after `KEEPALIVE_S`."""
    stuck = {(learner, way): [] for way in ways}
    self.silent |= stuck
    process, reason = self.learners[learner], 'no answer to a keepalive'
    lost = syncer_events.Lost(learner, process.incarnation, reason)

    def noticed():
      if not all(self.silent.get(key) is held for key, held in stuck.items()):
        return  # It was over before that.
      for held in stuck.values():
        held.clear()  # Lost with the socket.
      self.syncer.deliver(lost)
      process.when_it_runs(lambda: process.disconnect(reason, lost.incarnation))

    self.sim.after(KEEPALIVE_S, noticed)

  def speak(self, learner: int):
    """Restores a silent link: what was held back is sent again, and arrives."""
    for way in WAYS:
      for callback in self.silent.pop((learner, way), ()):
        callback()

  def is_silent(self, learner: int) -> bool:
    return any((learner, way) in self.silent for way in WAYS)

  def _on_the_way(self, learner: int, way: str, callback: Callable[[], None]):
    """Calls `callback` once the message is through."""
    stuck = self.silent.get((learner, way))
    if stuck is None:
      callback()
    else:
      stuck.append(callback)

  def fill_disk(self):
    """Fills the syncer's disk: ledgers wait, and so do messages after them."""
    self.disk_full = True

  def free_disk(self):
    self.disk_full = False
    self.syncer.disk_is_free()

  def kill_syncer(self):
    """Simulates kill -9 of the syncer; what it had written stays."""
    assert self.syncer.alive, 'the syncer is dead'
    self.syncer.alive = False
    for shard in self.others.values():
      shard.lose_leader()
    for process in self.learners.values():
      self._disconnect(process, 'stream closed')

  def stop_syncer(self):
    """Simulates SIGSTOP of the syncer: its streams stay open, and silent."""
    self.syncer.stopped = True

  def resume_syncer(self):
    self.syncer.resume()

  def lose_disk(self):
    """Deletes the dead syncer's folder, ledger and all."""
    assert not self.syncer.alive, 'the syncer is alive'
    self.syncer.disk = None

  def start_syncer(self):
    """Starts a new process of the syncer, which resumes from the disk."""
    assert not self.syncer.alive, 'the syncer is alive'
    self.syncer = SimulatedSyncer(self, self.syncer.disk)
    self._syncer_started()

  def _syncer_started(self):
    self.observer.syncer_started(self.syncer)
    for shard in self.others.values():
      if shard.alive:
        shard.greet()

  def kill_shard(self, shard: int):
    """Simulates kill -9 of a syncer process that does not lead."""
    self.others[shard].kill()

  def start_shard(self, shard: int):
    """Starts a new process of a shard, which resumes from its checkpoint."""
    self.others[shard].start()

  @property
  def at_rest(self) -> bool:
    """True if no step and no merge is in progress."""
    steps = any(process.in_step for process in self.learners.values())
    return not steps and not self.syncer.merging

  def save(self) -> SavedCluster:
    """Returns a checkpoint; messages and offers under way are not in it."""
    trains = [x for x in self.learners.values() if x.training and not x.gone]
    for process in trains:
      process.save()
    return SavedCluster(
      self.sim.now,
      self.syncer.save(),
      {process.id: self.saved[process.id] for process in trains},
      self._incarnations,
      self._handles,
    )

  def run(self, until: float):
    """Runs up to a time, or to the end of the run."""
    self.sim.run(until, stop=lambda: self.ended is not None)

  # What the processes want --------------------------------------------------

  def to_syncer(self, process: SimulatedLearner, message):
    """Sends a message of a session, unless the link is cut."""
    self._up(syncer_events.Heard(process.id, process.incarnation, message))

  def lost(
    self, process: SimulatedLearner, reason: str, through_the_cut: bool = False
  ):
    """Notes a stream that ended at the learner; the syncer's host sees it."""
    lost = syncer_events.Lost(process.id, process.incarnation, reason)
    self._up(lost, through_the_cut)

  def _up(self, event: syncer_events.Event, through_the_cut: bool = False):
    syncer, learner = self.syncer, event.learner

    def arrive():
      if through_the_cut:
        syncer.deliver(event)
      elif learner not in self.cut:
        self._on_the_way(learner, 'up', lambda: syncer.deliver(event))
      else:
        self.observer.message_lost(learner, event.incarnation)

    self.sim.after(self.timing.up_s(learner), arrive)

  def to_learner(self, learner: int, incarnation: int, message):
    """Sends a message of a session; a stopped process reads it later."""
    process = self.learners[learner]

    def read():
      if process.incarnation == incarnation and learner not in self.cut:
        process.receive(message)

    self._down(process, read)

  def drop(self, effect: syncer_events.EndSession):
    """Closes a stream from the syncer's side."""
    process = self.learners[effect.learner]
    if process.incarnation == effect.incarnation:
      self._disconnect(process, effect.reason)

  def _disconnect(self, process: SimulatedLearner, reason: str):
    session = process.incarnation
    self._down(process, lambda: process.disconnect(reason, session))

  def _down(self, process: SimulatedLearner, read: Callable[[], None]):
    """Calls `read` once the message is through, and the process runs."""

    def arrive():
      self._on_the_way(process.id, 'down', lambda: process.when_it_runs(read))

    self.sim.after(self.timing.down_s(process.id), arrive)

  def reaches_syncer(self, learner: int) -> bool:
    """Returns True if a learner can open a stream to the syncer now."""
    syncer = self.syncer
    runs = syncer.alive and not syncer.stopped
    return runs and self.is_reached(learner)

  def reaches(self, learner: int, incarnation: int) -> bool:
    """Returns True if bytes can be pulled from a session's process now."""
    process = self.learners[learner]
    runs = not process.gone and not process.stopped
    session = process.incarnation == incarnation
    return runs and session and self.is_reached(learner)

  def is_reached(self, learner: int) -> bool:
    """Returns True if anything reaches the learner now."""
    return learner not in self.cut and not self.is_silent(learner)

  def when_reached(
    self, process: SimulatedLearner, callback: Callable[[], None]
  ):
    """Calls `callback` once bytes come through and the process runs."""
    ways = [way for way in WAYS if (process.id, way) in self.silent]
    self._on_the_way(
      process.id, (*ways, 'up')[0], lambda: process.when_it_runs(callback)
    )

  # Draws and numbers --------------------------------------------------------

  def draw_step_s(self, learner: int) -> float:
    speeds = self.options.speeds
    if speeds is not None:
      return speeds[learner](self.sim.now)
    mean_s = self.timing.step_s[learner]
    drawn_s = self._random.gauss(mean_s, self.timing.jitter * mean_s)
    slow_share = self.timing.slow_share
    if slow_share and self._random.random() < slow_share:
      drawn_s *= 3.0
    return max(drawn_s, 0.1 * mean_s)

  def draw_late_s(self) -> float:
    """Draws how much longer than usual a pull of the syncer takes."""
    share = self.timing.late_share
    late = share > 0.0 and self._late_random.random() < share
    return self.timing.late_s if late else 0.0

  def fails(self) -> bool:
    return self._random.random() < self.loss

  def batch_of(self, learner: int) -> int:
    """Returns the rows of a step of the learner's next process."""
    return self.options.batch_of(learner, self._started[learner])

  def process_number(self, learner: int) -> int:
    """Returns the number of a process that starts now: its clock in ms."""
    wrong_s = (self.clocks_s or {}).get(learner, 0.0)
    return int((EPOCH_S + self.sim.now + wrong_s) * 1000)

  def next_incarnation(self, process: int, session: int) -> int:
    """Returns the incarnation of a process's session number `session`."""
    if self.clocks_s is not None:
      return (process << SESSION_BITS) + session
    self._incarnations += 1
    return self._incarnations

  def next_handle(self) -> int:
    self._handles += 1
    return self._handles
