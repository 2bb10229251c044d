# SPDX-License-Identifier: Apache-2.0
"""The very same plan on the real machines under the simulated clock."""

import collections
import dataclasses
import functools
import random
import re
from collections.abc import Callable, Sequence

from diloco import faults
from diloco.faults import Fault, Impairment, number_of
from diloco.fleets.speeds import Speeds
from diloco.fleets.tally import Tally
from diloco.metrics import goodput as metrics_goodput
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.syncer import events as syncer_events
from diloco.simulator.cluster import Cluster, ClusterOptions
from diloco.simulator.network import USUAL, LinkDeviation, UnequalWires
from diloco.simulator.timing import Timing
from launch.program import SYNCER

LATENCY_S = 0.001  # Of a message between two processes of one machine.
TRANSFER_S = 0.002
RECONNECT_S = 0.5
AGAIN_S = 0.2
LATE_S = 20.0
DELAY_LESS_S = 0.001


@dataclasses.dataclass(frozen=True)
class Speed:
  """The speed of the processes, as measured in the real run.

  Attributes:
    step_s: mean length of an inner step, by learner.
    jitter: standard deviation of a step's length, as a share of it.
    stall_share: share of a step that is spent waiting.
    sync_s: from a round's first pull to its update.
    learner_start_s: from the start of a learner's process to its first step.
    hello_s: from the start of a learner's process to its first hello.
    leave_s: from SIGTERM to the end of a learner's process.
    syncer_start_s: from the start of the syncer's process to its first line.
    restart_delay_s: from a death to the next start.
    arrival_s: when each learner made its first step, since the first one.
  """

  step_s: tuple[float, ...]
  jitter: float
  stall_share: float
  sync_s: float
  learner_start_s: float
  hello_s: float
  leave_s: float
  syncer_start_s: float
  restart_delay_s: float
  arrival_s: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class SimulatedRun:
  """The result of the simulation of a plan.

  Attributes:
    goodput: of the first M learners, over the plan and the calm before it.
    uptime: likewise.
    rounds: that closed.
    steps: inner steps of all learners.
    participation: share of the rounds that included a learner, by id.
    refused: by reason.
    steps_s: when each learner ended its steps, by id.
    versions: findings on versions that did not rise by one.
  """

  goodput: float
  uptime: float
  rounds: int
  steps: int
  participation: dict[int, float]
  refused: dict[str, int]
  steps_s: dict[int, tuple[float, ...]]
  versions: tuple[str, ...]


class _Watch(Tally):
  """Counts also refusals, ends of steps and versions."""

  def __init__(self, until_s: float):
    super().__init__(timeline_s=until_s)
    self.refused: collections.Counter[str] = collections.Counter()
    self.versions: list[str] = []
    self._last: dict[int, int] = {}

  def at_syncer(self, syncer, event, effects):
    super().at_syncer(syncer, event, effects)
    for effect in effects:
      match effect:
        case syncer_events.LogDecision(kind='refused'):
          self.refused[reason_of(effect.reason)] += 1
        case syncer_events.Publish():
          p, before = effect.fragment, self._last.get(effect.fragment, 0)
          if effect.version != before + 1:
            found = f'fragment {p}: {effect.version} after {before}'
            self.versions.append(found)
          self._last[p] = effect.version


def reason_of(text: str) -> str:
  """Returns a reason without its figures, so that equal ones are counted."""
  return re.sub(r'\d+(\.\d+)?', '…', text.partition(':')[0])


class SimulatedStage:
  """A `faults.FaultStage` of simulated processes.

  Args:
    cluster: its learners 0 … M − 1 are started.
  """

  NAME = 'simulated processes'

  def __init__(self, cluster: Cluster, speed: Speed, slow: set[int]):
    self._cluster = cluster
    self._speed = speed
    self._slow = slow
    self._dismissed: set[int] = set()
    cluster.clocks_s = {}

  def is_there(self, target: str) -> bool:
    """Returns True if the process runs."""
    cluster = self._cluster
    if target == SYNCER:
      return cluster.syncer.alive
    if _is_shard(target):
      return cluster.others[number_of(target)].alive
    process = cluster.learners.get(number_of(target))
    return process is not None and not process.gone

  def look(self) -> None:
    """Starts learners again that have left or were told to, as launchers do."""
    for m, process in sorted(self._cluster.learners.items()):
      if process.gone and process.alive and m not in self._dismissed:
        process.alive = False
        self._back(m, self._speed.leave_s)

  def kill(self, target: str) -> None:
    """Kills a process, which comes back after a start-up."""
    cluster, speed = self._cluster, self._speed
    back_s = speed.restart_delay_s + speed.syncer_start_s
    if target == SYNCER:
      cluster.kill_syncer()
      cluster.sim.after(back_s, cluster.start_syncer)
    elif _is_shard(target):
      shard = number_of(target)
      cluster.kill_shard(shard)
      cluster.sim.after(back_s, lambda: cluster.start_shard(shard))
    else:
      cluster.kill(number_of(target))
      self._back(number_of(target))

  def _back(self, learner: int, more_s: float = 0.0) -> None:
    def start():
      process = self._cluster.learners[learner]
      if process.gone:
        self._cluster.start(learner)

    wait_s = self._speed.restart_delay_s + self._speed.learner_start_s
    self._cluster.sim.after(wait_s + more_s, start)

  def pause(self, target: str) -> None:
    """Stops a process; a shard, which can't be stopped here, dies instead."""
    if target == SYNCER:
      self._cluster.stop_syncer()
    elif _is_shard(target):
      self._cluster.kill_shard(number_of(target))
    else:
      self._cluster.stop(number_of(target))

  def go_on(self, target: str) -> None:
    """Resumes a process."""
    if target == SYNCER:
      self._cluster.resume_syncer()
    elif _is_shard(target):
      self._cluster.start_shard(number_of(target))
    else:
      self._cluster.resume(number_of(target))

  def preempt(self, target: str, notice_s: float) -> None:
    """Tells a learner to leave; `look` brings it back."""
    self._cluster.preempt(number_of(target), notice_s)

  def dismiss(self, target: str, notice_s: float) -> None:
    """Tells a learner to leave for good."""
    self._dismissed.add(number_of(target))
    self.preempt(target, notice_s)

  def join(self, target: str) -> None:
    """Starts a learner of a new id, which says hello before it steps."""
    cluster, learner = self._cluster, number_of(target)

    def hello():
      cluster.start(learner)
      cluster.pause(learner)

    def step():
      process = cluster.learners[learner]
      if not process.gone:
        cluster.go_on(learner)

    cluster.sim.after(self._speed.hello_s, hello)
    cluster.sim.after(self._speed.learner_start_s, step)

  def slow(self, target: str, is_slow: bool) -> None:
    """Stretches its steps from the next one on."""
    change = self._slow.add if is_slow else self._slow.discard
    change(number_of(target))

  def cut(self, target: str, ways: tuple[str, ...]) -> None:
    """Silences a link."""
    self._cluster.silence(number_of(target), ways)

  def impair(self, target: str, impairment: Impairment) -> None:
    """Delays a link's messages, or loses transfers."""
    if impairment.loss:
      self._cluster.loss = impairment.loss
    else:
      self._delay(number_of(target), sum(impairment.delay_s) / 2)

  def mend(self, target: str) -> None:
    """Ends whatever is wrong with a link."""
    cluster, learner = self._cluster, number_of(target)
    cluster.speak(learner)
    cluster.wires.throttled.pop(learner, None)
    cluster.loss = 0.0
    self._delay_less(learner)

  def _delay_less(self, learner: int) -> None:
    # Little by little: no message of a stream may overtake an earlier one.
    usual = self._cluster.timing.links.get(learner, USUAL)
    left_s = max(0.0, usual.up_s - DELAY_LESS_S)
    self._delay(learner, left_s)
    if left_s:
      self._cluster.sim.after(DELAY_LESS_S, lambda: self._delay_less(learner))

  def _delay(self, learner: int, seconds: float) -> None:
    timing = self._cluster.timing
    links = {**timing.links, learner: LinkDeviation(seconds, seconds)}
    self._cluster.timing = dataclasses.replace(timing, links=links)

  def throttle(self, target: str) -> None:
    """Makes bytes take longer."""
    throttled = self._cluster.wires.throttled
    throttled[number_of(target)] = 1 / faults.THROTTLED_SHARE

  def fill_disk(self, target: str, is_full: bool) -> None:
    """Fills the syncer's disk; a learner's own checkpoints are no matter."""
    if target == SYNCER:
      (self._cluster.fill_disk if is_full else self._cluster.free_disk)()

  def set_clock(self, target: str, jump_s: float) -> None:
    """Sets the clock by which its next process is numbered, and kills it."""
    self._cluster.clocks_s[number_of(target)] = jump_s
    self.kill(target)


def _is_shard(target: str) -> bool:
  return target.startswith('shard-')


def simulate(
  config: ProtocolConfig,
  shards: int,
  tokens_per_step: int,
  speed: Speed,
  plan: Sequence[Fault],
  times_s: tuple[float, float],
  seed: int,
) -> SimulatedRun:
  """Runs the machines under the plan.

  Args:
    config: M and all else; the steps do not end.
    times_s: when the plan begins and when it ends, from the first step on.
  """
  begin_s, until_s = times_s
  watch = _Watch(until_s)
  slow: set[int] = set()
  ids = config.learners + sum(faults.adds(fault.kind) for fault in plan)
  step_s = [
    speed.step_s[m] if m < len(speed.step_s) else max(speed.step_s)
    for m in range(ids)
  ]
  cluster = Cluster(
    config,
    Timing(
      dict(enumerate(step_s)),
      latency_s=LATENCY_S,
      transfer_s=TRANSFER_S,
      merge_s=speed.sync_s,
      reconnect_s=RECONNECT_S,
    ),
    seed,
    observer=watch,
    options=ClusterOptions(
      checkpoint_rounds=config.fragments,
      wires=UnequalWires(
        TRANSFER_S, LATENCY_S, {}, (1.0,) * config.fragments, 0.0, seed
      ),
      speeds=_speeds(step_s, speed.jitter, slow, seed),
      tokens_per_step=tokens_per_step,
      shards=shards,
    ),
  )
  stage = SimulatedStage(cluster, speed, slow)
  for learner, at_s in enumerate(speed.arrival_s):
    cluster.sim.at(at_s, functools.partial(cluster.start, learner))
  for fault in plan:
    _schedule(cluster, stage, fault, begin_s)
  while cluster.sim.now < until_s:
    cluster.run(min(until_s, cluster.sim.now + AGAIN_S))
    stage.look()
  return _result(cluster, watch, config.learners, until_s, speed.stall_share)


def _speeds(
  step_s: Sequence[float], jitter: float, slow: set[int], seed: int
) -> dict[int, Callable[[float], float]]:
  """Returns how long the next step of each learner takes."""

  def of(learner: int) -> Callable[[float], float]:
    rng = random.Random(f'steps of {learner}, {seed}')
    speeds = Speeds(step_s[learner], jitter, rng)

    def next_s(now_s: float) -> float:
      factor = faults.SLOWER if learner in slow else 1.0
      return factor * speeds.next_s(now_s)

    return next_s

  return {m: of(m) for m in range(len(step_s))}


def _schedule(
  cluster: Cluster, stage: SimulatedStage, fault: Fault, begin_s: float
) -> None:
  due_s = begin_s + fault.at_s

  def begin():
    if not faults.adds(fault.kind) and not stage.is_there(fault.target):
      if cluster.sim.now < due_s + LATE_S:
        cluster.sim.after(AGAIN_S, begin)
      return
    faults.begin(stage, fault)
    cluster.sim.after(fault.hold_s, lambda: faults.end(stage, fault))

  cluster.sim.at(due_s, begin)


def _result(
  cluster: Cluster,
  watch: _Watch,
  learners: int,
  until_s: float,
  stall_share: float,
) -> SimulatedRun:
  watch.settle()
  for learner in cluster.learners:
    watch.count(learner)
  works = [work for work in watch.works() if work.learner < learners]
  share = metrics_goodput.share(works, learners, 0.0, until_s)
  ends_s: dict[int, list[float]] = collections.defaultdict(list)
  for m, _, end_s in watch.steps_spans:
    ends_s[m].append(end_s)
  rounds = max(1, watch.rounds)
  return SimulatedRun(
    goodput=(1 - stall_share) * share,
    uptime=watch.stepping.measure_s(until_s) / until_s,
    rounds=watch.rounds,
    steps=sum(count.steps for count in watch.learners.values()),
    participation={
      m: count.merged / rounds for m, count in sorted(watch.learners.items())
    },
    refused=dict(watch.refused),
    steps_s={m: tuple(times_s) for m, times_s in sorted(ends_s.items())},
    versions=tuple(watch.versions),
  )
