# SPDX-License-Identifier: Apache-2.0
"""The machines of a run under its faults and its speeds, in simulated time."""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence

from diloco import faults
from diloco.config import unlike
from diloco.config.run_config import RunConfig
from diloco.faults import Fault, Impairment, number_of
from diloco.fleets.speeds import Speeds as StepLengths
from diloco.fleets.tally import Tally
from diloco.metrics import goodput as metrics_goodput
from diloco.metrics.goodput import StepRecord
from diloco.metrics.recorded_run import SYNCER
from diloco.metrics.workdir import learner_name
from diloco.prediction.recorded import Speeds
from diloco.simulator.cluster import Cluster, ClusterOptions, Timing
from diloco.simulator.network import USUAL, LinkDeviation, UnequalWires

LATENCY_S = 0.001  # Of a message between two processes of one machine.
TRANSFER_S = 0.002
# Between two attempts of a learner to find the syncer: the longest pause of
# `learner/connection.py`.
RECONNECT_S = 0.5
FOREVER_STEPS = 10**9  # The simulation ends when the run did.
# Of a start-up that was measured once, its standard deviation as a share: the
# starts of nine runs on two shared cores had 4 % to 31 % of their means.
START_SPREAD = 0.15
AGAIN_S = 0.2  # Between two looks at processes that have left,
LATE_S = 20.0  # and so long a fault waits for its target to run.
DELAY_LESS_S = 0.001


@dataclasses.dataclass(frozen=True)
class Twin:
  """The result of one simulation of a run; `counts` has all about rounds."""

  goodput: float  # Of the M learners, with stalls; no newcomer counts.
  uptime: float  # Share of the time in which at least one learner stepped.
  steps: tuple[StepRecord, ...]  # Inner steps of all learners.
  counts: Tally

  @property
  def rounds(self) -> int:
    return self.counts.rounds

  def participation(self, learner: int) -> float | None:
    """Returns the share of the closed rounds that merged a learner."""
    return self.counts.participation(learner)


class SimulatedStage:
  """A `faults.FaultStage` of simulated processes.

  Args:
    rng: draws how long each start takes, of those that were measured.
  """

  NAME = 'simulated processes'

  def __init__(
    self,
    cluster: Cluster,
    speeds: Speeds,
    restart_delay_s: float,
    rng: random.Random,
  ):
    self.slow_learners: set[int] = set()
    self._cluster = cluster
    self._speeds = speeds
    self._delay_s = restart_delay_s
    self._rng = rng
    self._dismissed: set[int] = set()
    self._due_s: dict[str, float] = {}  # When each that starts will be there.
    cluster.clocks_s = {}

  def perform(self, fault: Fault, begin_s: float) -> None:
    """Lets a fault come at its time; it waits for its target to run.

    Args:
      begin_s: when the plan begins.
    """
    sim, due_s = self._cluster.sim, max(0.0, begin_s + fault.at_s)

    def begin():
      if not faults.adds(fault.kind) and not self._can_be_hit(fault):
        if sim.now < due_s + LATE_S:
          sim.after(AGAIN_S, begin)
        return
      faults.begin(self, fault)
      sim.after(fault.hold_s, lambda: faults.end(self, fault))

    sim.at(due_s, begin)

  def _can_be_hit(self, fault: Fault) -> bool:
    """A process can be killed while it starts, and then starts anew."""
    target = fault.process
    if fault.kind in ('kill', 'kill_host') and target in self._due_s:
      return True
    if target == SYNCER:
      return self._cluster.syncer.alive
    if _is_shard(target):
      return self._cluster.others[number_of(target)].alive
    process = self._cluster.learners.get(number_of(target))
    return process is not None and not process.gone

  def arrive(self, learner: int, at_s: float | None) -> None:
    """Starts a learner at a time; None: it is killed before it steps."""
    at_s = math.inf if at_s is None else max(0.0, at_s)
    self._start_at(learner_name(learner), at_s)

  def look(self) -> None:
    """Starts learners again that have left or were told to, as launchers do."""
    for m, process in sorted(self._cluster.learners.items()):
      if process.gone and process.alive and m not in self._dismissed:
        process.alive = False
        self._start(learner_name(m), self._speeds.leave_s + self._delay_s)

  def _start(self, target: str, wait_s: float) -> None:
    """Starts a process after a wait; a start-up later it is there."""
    speeds = self._speeds
    is_learner = target.startswith(faults.LEARNER)
    took_s = speeds.learner_starts_s if is_learner else speeds.syncer_starts_s
    if len(took_s) > 1:
      start_s = self._rng.choice(took_s)
    else:
      start_s = took_s[0] * max(0.5, self._rng.gauss(1.0, START_SPREAD))
    self._start_at(target, self._cluster.sim.now + wait_s + start_s)

  def _start_at(self, target: str, at_s: float) -> None:
    self._due_s[target] = at_s

    def start():
      if self._due_s.get(target) != at_s:
        return  # It was killed meanwhile.
      del self._due_s[target]
      cluster = self._cluster
      _act(target, cluster.start_syncer, cluster.start_shard, cluster.start)

    if math.isfinite(at_s):
      self._cluster.sim.at(at_s, start)

  # The verbs -----------------------------------------------------------------

  def kill(self, target: str) -> None:
    """Kills a process, which comes back after a start-up."""
    target = target.partition('.')[0]  # The hosts of a learner die together.
    if target not in self._due_s:
      cluster = self._cluster
      _act(target, cluster.kill_syncer, cluster.kill_shard, cluster.kill)
    self._start(target, self._delay_s)

  def kill_slice(self, target: str) -> None:
    """Takes a slice from a learner; all are back after their delay."""
    learner = number_of(target)
    self.lose_slice(target)
    self._cluster.sim.after(
      self._delay_s, lambda: self.return_slice(learner_name(learner))
    )

  def lose_slice(self, target: str) -> None:
    """Takes a slice from a learner, which starts again if it holds nothing."""
    cluster, learner = self._cluster, number_of(target)
    left = cluster.live_slices[learner] - 1
    if left and cluster.learners[learner].held() is not None:
      cluster.reform(learner, left)
    else:
      self.kill(target)

  def return_slice(self, target: str) -> None:
    """Gives a learner all its slices back, once it trains."""
    cluster, learner = self._cluster, number_of(target)
    process, count = cluster.learners[learner], cluster.options.slices[learner]
    if cluster.live_slices[learner] == count:
      return
    if process.training and not process.gone and process.held():
      cluster.reform(learner, count)
    else:
      cluster.sim.after(AGAIN_S, lambda: self.return_slice(target))

  def pause(self, target: str) -> None:
    """Stops a process; a shard, which can't be stopped here, dies instead."""
    cluster = self._cluster
    _act(target, cluster.stop_syncer, cluster.kill_shard, cluster.stop)

  def go_on(self, target: str) -> None:
    """Resumes a process."""
    cluster = self._cluster
    _act(target, cluster.resume_syncer, cluster.start_shard, cluster.resume)

  def preempt(self, target: str, notice_s: float) -> None:
    """Tells a learner to leave; `look` brings it back."""
    self._cluster.preempt(number_of(target), notice_s)

  def dismiss(self, target: str, notice_s: float) -> None:
    """Tells a learner to leave for good."""
    self._dismissed.add(number_of(target))
    self.preempt(target, notice_s)

  def join(self, target: str) -> None:
    """Starts a learner of a new id."""
    self._start(target, 0.0)

  def slow(self, target: str, is_slow: bool) -> None:
    """Stretches its steps from the next one on."""
    slow = self.slow_learners
    (slow.add if is_slow else slow.discard)(number_of(target))

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


def _act(
  target: str,
  on_syncer: Callable[[], None],
  on_shard: Callable[[int], None],
  on_learner: Callable[[int], None],
) -> None:
  """Does to a process what is done to one of its kind."""
  if target == SYNCER:
    on_syncer()
  else:
    act = on_shard if _is_shard(target) else on_learner
    act(number_of(target))


def simulate(
  config: RunConfig,
  speeds: Speeds,
  arrivals: Sequence[float | None],
  plan: Sequence[Fault],
  times_s: tuple[float, float],
  seed: int,
) -> Twin:
  """Runs the machines of a configuration under a plan of faults.

  Args:
    arrivals: by learner, when its first process steps; None: it is killed
      before.
    times_s: when the plan begins and when it ends, from the first step on.
    seed: of step lengths and of start-ups.
  """
  (begin_s, until_s), protocol = times_s, config.protocol
  ids = protocol.learners + sum(faults.adds(fault.kind) for fault in plan)
  step_s = [
    speeds.step_s[m] if m < len(speeds.step_s) else max(speeds.step_s)
    for m in range(ids)
  ]
  counts = Tally(timeline_s=until_s)

  def lengths(learner: int) -> Callable[[float], float]:
    # Each has its own stream of draws: no learner affects another's.
    rng = random.Random(f'steps of {learner}, {seed}')
    drawn = StepLengths(step_s[learner], speeds.jitter, rng)

    def next_s(now_s: float) -> float:
      slows = learner in stage.slow_learners
      return (faults.SLOWER if slows else 1.0) * drawn.next_s(now_s)

    return next_s

  setups = unlike.setups(config, config.data.shards)
  cluster = Cluster(
    dataclasses.replace(protocol, total_steps=FOREVER_STEPS),
    Timing(
      dict(enumerate(step_s)),
      latency_s=LATENCY_S,
      transfer_s=TRANSFER_S,
      merge_s=speeds.sync_s,
      reconnect_s=RECONNECT_S,
    ),
    seed,
    observer=counts,
    options=ClusterOptions(
      checkpoint_rounds=protocol.fragments,
      wires=UnequalWires(
        TRANSFER_S, LATENCY_S, {}, (1.0,) * protocol.fragments, 0.0, seed
      ),
      speeds={m: lengths(m) for m in range(ids)},
      batch_of=lambda m, _: (
        setups[m].config.data.batch // setups[m].config.mesh.slices
      ),
      row_tokens=config.data.seq_len,
      shards=config.syncer.shards,
      slices={
        m: setup.config.mesh.slices
        for m, setup in enumerate(setups)
        if setup.config.mesh.slices > 1
      },
      reform_s=lambda before: (
        speeds.reform_s if before else speeds.first_reform_s
      ),
    ),
  )
  stage = SimulatedStage(
    cluster, speeds, config.run.restart_delay_s, random.Random(f'starts {seed}')
  )
  for learner, at_s in enumerate(arrivals):
    stage.arrive(learner, at_s)
  for fault in plan:
    stage.perform(fault, begin_s)
  while cluster.sim.now < until_s:
    cluster.run(min(until_s, cluster.sim.now + AGAIN_S))
    stage.look()
  counts.settle()
  works = [x for x in counts.works() if x.learner < protocol.learners]
  share = metrics_goodput.share(works, protocol.learners, 0.0, until_s)
  return Twin(
    goodput=(1 - speeds.stall_share) * share,
    uptime=counts.uptime(until_s),
    steps=tuple(
      StepRecord(m, end_s, step_s, stall_s=speeds.stall_share * step_s)
      for m, begin_s, end_s in counts.steps_spans
      if (step_s := end_s - begin_s)
    ),
    counts=counts,
  )
