# SPDX-License-Identifier: Apache-2.0
"""Real syncer and learner machines in a simulated cluster, without arrays.

Messages take a latency, bytes a transfer time; whatever is on its way to a
dead process is lost. Nothing here decides anything: that is the machines'
part. The processes are in `simulated_syncer` and `simulated_learner`.
"""

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

from diloco.protocol import learner_io, patience, syncer_io
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.joining import Start
from diloco.sim.contents import Contents, Symbols
from diloco.sim.engine import Simulation
from diloco.sim.simulated_learner import SESSION_BITS, SimulatedLearner
from diloco.sim.simulated_shard import SimulatedShard
from diloco.sim.simulated_syncer import SimulatedSyncer
from diloco.sim.watch import Watch
from diloco.sim.wires import USUAL, Link, SteadyWires, Wires

Ways = tuple[str, ...]  # Of 'up' and 'down': to the syncer, and from it.
BOTH_WAYS = ('up', 'down')
EPOCH_S = 1e6  # When a simulation begins, by a clock that is right.
KEEPALIVE_S = 5.0  # After which silence breaks a stream on both sides.


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
    slow_share: of the steps; those take three times as long.
    links: of learners whose link is not the usual one, by id.
    late_share: of the syncer's pulls; those take `late_s` more, and succeed.
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
  links: Mapping[int, Link] = dataclasses.field(default_factory=dict)

  def up_s(self, learner: int) -> float:
    """Latency of a message to the syncer."""
    return self.latency_s + self.links.get(learner, USUAL).up_s

  def down_s(self, learner: int) -> float:
    """Latency of a message from it."""
    return self.latency_s + self.links.get(learner, USUAL).down_s

  @property
  def pull_s(self) -> float:
    """From the syncer's asking for bytes to its having them."""
    return self.latency_s + self.transfer_s


class Cluster:
  """One syncer and its learners under one simulated clock.

  Args:
    config: of the protocol.
    timing: how long things take.
    seed: of the step lengths and of lost transfers.
    loss: probability that a transfer of bytes fails.
    watch: is told of every event and its effects.
    checkpoint_rounds: closes between two checkpoints of the syncer.
    checkpoint_steps: between two of a learner's own; None: it writes none.
    wires: carry the bytes; None: `timing.transfer_s` each.
    speeds: of each learner, the length of a step that begins at a time; None:
      drawn as `timing` says.
    tokens_per_step: of every learner.
    contents: what the processes hold; None: symbols.
    shards: S, the processes of the syncer; more than 1 with symbols only.

  Attributes:
    partitions: how learners of several hosts share their state, by id.
    disk_full: the syncer's, no ledger can be written.
    clocks_s: by how much the learners' clocks are wrong, by id; None: an
      incarnation is a number that rises for all.
  """

  def __init__(
    self,
    config: ProtocolConfig,
    timing: Timing,
    seed: int,
    loss: float = 0.0,
    watch: Watch | None = None,
    checkpoint_rounds: int = 1,
    checkpoint_steps: int | None = None,
    wires: Wires | None = None,
    speeds: Mapping[int, Callable[[float], float]] | None = None,
    tokens_per_step: int = 1024,
    contents: Contents | None = None,
    shards: int = 1,
  ):
    self.config = config
    self.timing = timing
    self.loss = loss
    self.watch = watch or Watch()
    self.checkpoint_steps = checkpoint_steps
    self.wires = wires or SteadyWires(timing.transfer_s, timing.latency_s)
    self.tokens_per_step = tokens_per_step
    self.contents = contents or Symbols(config.fragments)
    self.sim = Simulation()
    self.learners: dict[int, SimulatedLearner] = {}
    # Learners' own checkpoints, and what was saved of the contents.
    self.saved: dict[int, tuple[Start, Any]] = {}
    self.ended: syncer_io.End | None = None
    self.cut: set[int] = set()  # Learners that no message reaches or leaves.
    # What is stuck where bytes vanish, and no stream closes, by way.
    self.silent: dict[tuple[int, str], list[Callable[[], None]]] = {}
    self.partitions: Mapping[int, str] = {}
    self.disk_full = False
    self.clocks_s: dict[int, float] | None = None
    self._checkpoint_rounds = checkpoint_rounds
    self._random = random.Random(seed)
    # Apart, so that a seed's other draws do not depend on it.
    self._late_random = random.Random(f'late {seed}')
    self._speeds = speeds
    self._incarnations = 0
    self._handles = 0
    self.shards = shards
    self.others = {s: SimulatedShard(self, s) for s in range(1, shards)}
    self.syncer = SimulatedSyncer(self, disk=None)
    self._syncer_started()

  # What a scenario does -----------------------------------------------------

  def start(self, learner: int):
    """Starts a process for `learner`, in place of a dead one if need be."""
    old = self.learners.get(learner)
    assert old is None or old.gone, f'learner {learner} is alive'
    process = SimulatedLearner(self, learner, *self.saved.get(learner, ()))
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
    """SIGCONT: what lay in the socket is read now."""
    self.learners[learner].resume()

  def pause(self, learner: int):
    """Its machines are rearranged: no steps, but the process is there."""
    self.learners[learner].pause()

  def go_on(self, learner: int, redoes_step: bool):
    """They are in place again; the step of before is finished, or redone."""
    self.learners[learner].go_on(redoes_step)

  def preempt(self, learner: int, notice_s: float, kills: bool = False):
    """SIGTERM: leaves in good order, as far as the time allows.

    Args:
      learner: the id.
      notice_s: that it is told.
      kills: SIGKILL follows then.
    """
    process = self.learners[learner]
    process.when_it_runs(lambda: process.handle(learner_io.Stop(notice_s)))

    def over():
      if self.learners[learner] is process and not process.gone:
        self.kill(learner)

    if kills:
      self.sim.after(notice_s, over)

  def spoil(self, learner: int, stretch: float = 1.0, unusable: bool = False):
    """What this process offers from now on is too long, or unusable."""
    process = self.learners[learner]
    process.stretch, process.unusable = stretch, unusable

  def partition(self, learner: int):
    """The network between a learner and everybody else goes away."""
    self.cut.add(learner)
    process = self.learners[learner]
    self.lost(process, 'unreachable', through_the_cut=True)
    self._disconnect(process, 'unreachable')

  def heal(self, learner: int):
    self.cut.discard(learner)

  def silence(self, learner: int, ways: Ways):
    """Bytes vanish on these ways; the streams notice only in `KEEPALIVE_S`."""
    stuck = {(learner, way): [] for way in ways}
    self.silent |= stuck
    process, incarnation = (
      self.learners[learner],
      self.learners[learner].incarnation,
    )

    def noticed():
      if not all(self.silent.get(key) is held for key, held in stuck.items()):
        return  # It was over before that.
      for held in stuck.values():
        held.clear()  # With the socket.
      lost = syncer_io.Lost(learner, incarnation, 'no answer to a keepalive')
      self.syncer.deliver(lost)

      def read():
        if process.incarnation == incarnation:
          process.disconnect('no answer to a keepalive')

      process.when_it_runs(read)

    self.sim.after(KEEPALIVE_S, noticed)

  def speak(self, learner: int):
    """What was stuck is sent again, and arrives."""
    for way in BOTH_WAYS:
      for callback in self.silent.pop((learner, way), ()):
        callback()

  def is_silent(self, learner: int) -> bool:
    return any((learner, way) in self.silent for way in BOTH_WAYS)

  def _on_the_way(self, learner: int, way: str, callback: Callable[[], None]):
    """Calls it once the message is through."""
    stuck = self.silent.get((learner, way))
    if stuck is None:
      callback()
    else:
      stuck.append(callback)

  def fill_disk(self):
    """The syncer's: ledgers wait, and with them what is told after them."""
    self.disk_full = True

  def free_disk(self):
    self.disk_full = False
    self.syncer.disk_is_free()

  def kill_syncer(self):
    """kill -9; what it had written stays."""
    assert self.syncer.alive, 'the syncer is dead'
    self.syncer.alive = False
    for shard in self.others.values():
      shard.lose_lead()
    for process in self.learners.values():
      self._disconnect(process, 'stream closed')

  def stop_syncer(self):
    """SIGSTOP: nobody hears of it, nothing is answered."""
    self.syncer.stopped = True

  def resume_syncer(self):
    self.syncer.resume()

  def lose_disk(self):
    """The dead syncer's folder goes away, ledger and all."""
    assert not self.syncer.alive, 'the syncer is alive'
    self.syncer.disk = None

  def start_syncer(self):
    """A new process of the syncer goes on from the disk."""
    assert not self.syncer.alive, 'the syncer is alive'
    self.syncer = SimulatedSyncer(self, self.syncer.disk)
    self._syncer_started()

  def _syncer_started(self):
    self.watch.syncer_started(self.syncer)
    for shard in self.others.values():
      if shard.alive:
        shard.greet()

  def kill_shard(self, shard: int):
    """kill -9 of a process of the syncer that does not lead."""
    self.others[shard].kill()

  def start_shard(self, shard: int):
    """A new process of it goes on from its own checkpoint."""
    self.others[shard].start()

  def run(self, until: float):
    """Runs up to a time, or to the end of the run."""
    self.sim.run(until, stop=lambda: self.ended is not None)

  # What the processes want --------------------------------------------------

  def to_syncer(self, process: SimulatedLearner, message):
    """A message of a session, unless it is cut off on the way."""
    event = syncer_io.Heard(process.id, process.incarnation, message)
    syncer = self.syncer

    def arrive():
      if process.id not in self.cut:
        self._on_the_way(process.id, 'up', lambda: syncer.deliver(event))

    self.sim.after(self.timing.up_s(process.id), arrive)

  def lost(
    self, process: SimulatedLearner, reason: str, through_the_cut: bool = False
  ):
    """A stream has ended on the learner's side; the syncer's host sees it."""
    event = syncer_io.Lost(process.id, process.incarnation, reason)
    syncer = self.syncer

    def arrive():
      if through_the_cut:
        syncer.deliver(event)
      elif process.id not in self.cut:
        self._on_the_way(process.id, 'up', lambda: syncer.deliver(event))

    self.sim.after(self.timing.up_s(process.id), arrive)

  def to_learner(self, learner: int, incarnation: int, message):
    """A message of a session; a stopped process reads it later."""
    process = self.learners[learner]

    def read():
      if process.incarnation == incarnation and learner not in self.cut:
        process.hear(message)

    def arrive():
      self._on_the_way(learner, 'down', lambda: process.when_it_runs(read))

    self.sim.after(self.timing.down_s(learner), arrive)

  def drop(self, effect: syncer_io.Drop):
    """The syncer closes a stream."""
    process = self.learners[effect.learner]
    if process.incarnation == effect.incarnation:
      self._disconnect(process, effect.reason)

  def _disconnect(self, process: SimulatedLearner, reason: str):
    incarnation = process.incarnation

    def read():
      if process.incarnation == incarnation:
        process.disconnect(reason)

    def arrive():
      self._on_the_way(process.id, 'down', lambda: process.when_it_runs(read))

    self.sim.after(self.timing.down_s(process.id), arrive)

  def reaches_syncer(self, learner: int) -> bool:
    """Whether a learner can open a stream to the syncer now."""
    syncer = self.syncer
    runs = syncer.alive and not syncer.stopped
    return runs and learner not in self.cut and not self.is_silent(learner)

  def reaches(self, learner: int, incarnation: int) -> bool:
    """Whether bytes can be pulled from a session's process now."""
    process = self.learners[learner]
    runs = not process.gone and not process.stopped
    here = learner not in self.cut and not self.is_silent(learner)
    return runs and here and process.incarnation == incarnation

  def is_reached(self, learner: int) -> bool:
    """Whether anything comes through to it now."""
    return learner not in self.cut and not self.is_silent(learner)

  def when_reached(
    self, process: SimulatedLearner, callback: Callable[[], None]
  ):
    """Calls it once bytes come through and the process runs."""
    ways = [way for way in BOTH_WAYS if (process.id, way) in self.silent]
    self._on_the_way(
      process.id, (*ways, 'up')[0], lambda: process.when_it_runs(callback)
    )

  def is_checkpoint(self, round_: int) -> bool:
    """Whether the syncer writes Θ once this round has closed."""
    return round_ % self._checkpoint_rounds == 0

  # Draws and numbers --------------------------------------------------------

  def draw_step_s(self, learner: int) -> float:
    if self._speeds is not None:
      return self._speeds[learner](self.sim.now)
    mean_s = self.timing.step_s[learner]
    drawn_s = self._random.gauss(mean_s, self.timing.jitter * mean_s)
    if (
      self.timing.slow_share and self._random.random() < self.timing.slow_share
    ):
      drawn_s *= 3.0
    return max(drawn_s, 0.1 * mean_s)

  def draw_late_s(self) -> float:
    """How much longer than usual a pull of the syncer takes."""
    share = self.timing.late_share
    late = share > 0.0 and self._late_random.random() < share
    return self.timing.late_s if late else 0.0

  def transfer_max_s(self, usual_s: float) -> float:
    """When a pull from a stopped process times out."""
    knob = self.config.patience
    factor_s = patience.TRANSFER_FACTOR * usual_s
    return knob * max(patience.TRANSFER_FLOOR_S, factor_s)

  def fails(self) -> bool:
    return self._random.random() < self.loss

  def process_number(self, learner: int) -> int:
    """Of a process that starts now: the milliseconds of its clock."""
    wrong_s = (self.clocks_s or {}).get(learner, 0.0)
    return int((EPOCH_S + self.sim.now + wrong_s) * 1000)

  def next_incarnation(self, process: int, session: int) -> int:
    """Of the session number `session` of a process."""
    if self.clocks_s is not None:
      return (process << SESSION_BITS) + session
    self._incarnations += 1
    return self._incarnations

  def next_handle(self) -> int:
    self._handles += 1
    return self._handles
