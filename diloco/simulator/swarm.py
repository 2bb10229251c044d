# SPDX-License-Identifier: Apache-2.0
"""Checks random scenarios against the invariants; a seed draws a scenario.

First a safety phase: any process may die, and the invariants hold after every
event. Then a liveness phase: all heals, and every fragment must advance within
a bound, so that no process waits for ever.
"""

import collections
import dataclasses
import gc
import signal
from collections.abc import Callable, Iterable, Mapping

from diloco import faults
from diloco.faults import Fault, number_of
from diloco.protocol import messages
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.learner import events as learner_events
from diloco.protocol.syncer import events as syncer_events
from diloco.simulator.cluster import Cluster, ClusterOptions
from diloco.simulator.invariants import hold
from diloco.simulator.network import SYNCER, Cargo
from diloco.simulator.observer import ClusterObserver
from diloco.simulator.scenario import SYNCER_NAME, THROTTLED, Scenario, draw

# A violation, or an internal error of a machine.
TRIPS = AssertionError, AttributeError, LookupError, TypeError, ValueError
SYMPTOM_CHARS = 200  # For one failure in a list of many.
END_IN_SIGHT_STEPS = 30  # An end that is further away is not waited for.
MANY_LEARNERS = 16
SLOW_UPDATES = 16  # In succession, which take longer than their rounds.
# What a scenario may have had, as it is counted in the output.
SLOW_LINK = 'a link slower than rounds'
SEVERAL_VERSIONS = 'a pull of several versions'
LOST_FRAGMENT = f'a lost fragment and {MANY_LEARNERS} learners or more'
UNLIKE_BATCHES = 'a merge of unlike batches'
REFORMED = 'a learner that went on with other slices'
LOST_STEPS = 'steps lost with a slice'
WITNESSED = (
  SLOW_LINK,
  SEVERAL_VERSIONS,
  LOST_FRAGMENT,
  UNLIKE_BATCHES,
  REFORMED,
  LOST_STEPS,
)
LOOK_S = 1.0  # Interval of the checks of a healed run's progress.


class SwarmStage:
  """A `faults.FaultStage` of a cluster, which repairs what is broken already.

  No fault of a scenario has an end of its own: one that befalls a process that
  is broken repairs it.
  """

  NAME = 'swarms'

  def __init__(self, cluster: Cluster):
    self._cluster = cluster

  def repairs(self, fault: Fault) -> bool:
    """Repairs the target if it is broken; returns True if all is done."""
    cluster = self._cluster
    match fault.kind, fault.target:
      case 'kill', 'syncer' if not cluster.syncer.alive:
        cluster.start_syncer()
      case 'pause', 'syncer' if cluster.syncer.stopped:
        cluster.resume_syncer()
      case 'disk', _ if cluster.disk_full:
        cluster.free_disk()
      case 'kill', target if target.startswith('shard'):
        shard = number_of(target)
        if cluster.others[shard].alive:
          return False
        cluster.start_shard(shard)
      case (('clock' | 'kill_donor'), _):
        return False  # A clock can be set of a dead one; the donor is alive.
      case _ if fault.learner is not None:
        return self._repairs_learner(fault.learner)
      case _:
        return False
    return True

  def _repairs_learner(self, learner: int) -> bool:
    cluster, process = self._cluster, self._cluster.learners[learner]
    if process.gone:
      cluster.start(learner)
    elif process.stopped:
      cluster.resume(learner)
    elif learner in cluster.cut:
      cluster.heal(learner)
    elif cluster.is_silent(learner):
      cluster.speak(learner)
    else:
      return False
    return True

  def kill(self, target: str) -> None:
    """Kills a process; a later fault starts it again."""
    if target == SYNCER_NAME:
      self._cluster.kill_syncer()
    elif target.startswith('shard'):
      self._cluster.kill_shard(number_of(target))
    else:
      self._cluster.kill(number_of(target))

  def kill_slice(self, target: str) -> None:
    """Takes a slice from a learner, which goes on with the others, if any."""
    learner = number_of(target)
    self._cluster.reform(learner, self._cluster.live_slices[learner] - 1)

  def lose_slice(self, target: str) -> None:
    """The same, or gives it back all that it has lost."""
    learner = number_of(target)
    count = self._cluster.options.slices[learner]
    if self._cluster.live_slices[learner] == count:
      self.kill_slice(target)
    else:
      self._cluster.reform(learner, count)

  def kill_donor(self, target: str) -> None:
    """Kills whoever gives its state away, if somebody does."""
    cluster, learner = self._cluster, number_of(target)
    for m, process in sorted(cluster.learners.items()):
      asked = process.machine.snapshot().donations
      if not process.gone and (process.donations or asked):
        learner = m
        break
    if not self._repairs_learner(learner):
      cluster.kill(learner)

  def pause(self, target: str) -> None:
    """Stops a process."""
    if target == SYNCER_NAME:
      self._cluster.stop_syncer()
    else:
      self._cluster.stop(number_of(target))

  def preempt(self, target: str, notice_s: float) -> None:
    """Tells a learner to leave."""
    self._cluster.preempt(number_of(target), notice_s)

  def preempt_and_kill(self, target: str, notice_s: float) -> None:
    """Tells a learner to leave, and kills it if it has not."""
    self._cluster.preempt(number_of(target), notice_s, kills=True)

  def join(self, target: str) -> None:
    """Starts the next id, if one is left."""
    del target
    learner = len(self._cluster.learners)
    if learner in self._cluster.timing.step_s:
      self._cluster.start(learner)

  def cut(self, target: str, ways: tuple[str, ...]) -> None:
    """Silences a link."""
    self._cluster.silence(number_of(target), ways)

  def throttle(self, target: str) -> None:
    """Makes a learner's bytes take longer, or no longer."""
    throttled = self._cluster.wires.throttled
    if throttled.pop(number_of(target), None) is None:
      throttled[number_of(target)] = THROTTLED

  def mend(self, target: str) -> None:
    """Not called: the next fault of the same target ends this one."""
    raise AssertionError(target)

  go_on = return_slice = mend

  def partition(self, target: str) -> None:
    """Cuts a learner off."""
    self._cluster.partition(number_of(target))

  def fill_disk(self, target: str, is_full: bool) -> None:
    """Fills the syncer's disk."""
    del target
    if is_full:
      self._cluster.fill_disk()

  def lose_disk(self, target: str) -> None:
    """Deletes a dead syncer's folder."""
    del target
    if not self._cluster.syncer.alive:
      self._cluster.lose_disk()

  def set_clock(self, target: str, jump_s: float) -> None:
    """Sets a learner's clock, which its next process uses."""
    learner, clocks_s = number_of(target), self._cluster.clocks_s
    clocks_s[learner] = clocks_s.get(learner, 0.0) + jump_s

  def spoil(self, target: str, offers: str) -> None:
    """Makes a learner's offers too long, or unusable."""
    stretch = 1000.0 if offers == 'outliers' else 1.0
    self._cluster.spoil(number_of(target), stretch, offers == 'unusable')


class SwarmObserver(ClusterObserver):
  """Checks the invariants, and notes what of interest happened.

  Attributes:
    cluster: the cluster that it observes.
    witnessed: of `WITNESSED`.
  """

  def __init__(self, config: ProtocolConfig):
    super().__init__(config)
    self.cluster: Cluster | None = None
    self.witnessed: set[str] = set()
    # By learner, the newest updates for it: time of the close, time to pull.
    self._updates: dict[int, collections.deque[tuple[float, float]]] = {}

  def at_learner(self, process, event, effects):
    super().at_learner(process, event, effects)
    for effect in effects:
      match effect:
        case learner_events.FetchUpdates(updates=(_, _, *_)):
          self.witnessed.add(SEVERAL_VERSIONS)

  def at_syncer(self, syncer, event, effects):
    super().at_syncer(syncer, event, effects)
    for effect in effects:
      match effect:
        case syncer_events.Send(message=messages.DonateFragment()):
          alive = [x for x in self.cluster.learners.values() if not x.gone]
          if len(alive) >= MANY_LEARNERS:
            self.witnessed.add(LOST_FRAGMENT)
        case syncer_events.LogReformed():
          self.witnessed.add(REFORMED)
          if effect.lost_steps:
            self.witnessed.add(LOST_STEPS)
        case syncer_events.Publish(fragment=p, recipients=recipients):
          if len({x.c_tokens / x.c_steps for x in effect.shares}) > 1:
            self.witnessed.add(UNLIKE_BATCHES)
          for learner, _ in recipients:
            self._note_update(learner, p, syncer.now)

  def _note_update(self, learner: int, p: int, now_s: float):
    pull_s = self.cluster.wires.transfer_s(SYNCER, learner, Cargo.UPDATE, p)
    updates = self._updates.setdefault(
      learner, collections.deque(maxlen=SLOW_UPDATES)
    )
    took_s = sum(each_s for _, each_s in updates)
    if len(updates) == SLOW_UPDATES and took_s > now_s - updates[0][0]:
      self.witnessed.add(SLOW_LINK)
    updates.append((now_s, pull_s))


class Swarm:
  """One scenario as it goes."""

  def __init__(self, scenario: Scenario):
    self.scenario = scenario
    self.observer = SwarmObserver(scenario.config)
    self.cluster = Cluster(
      scenario.config,
      scenario.timing,
      scenario.seed,
      observer=self.observer,
      options=ClusterOptions(
        loss=scenario.loss,
        checkpoint_rounds=scenario.checkpoint_rounds,
        checkpoint_steps=scenario.checkpoint_steps,
        wires=scenario.wires(),
        shards=scenario.shards,
        batch_of=scenario.batch_of,
        slices=scenario.slices,
        slice_copy_steps=scenario.slice_copy_steps,
        reform_s=lambda before: scenario.reform_s,
      ),
    )
    self.observer.cluster = self.cluster
    self.stage = SwarmStage(self.cluster)
    self._healed = False
    self.cluster.partitions = scenario.partitions
    if scenario.is_wide:
      self.cluster.clocks_s = {}

  def run(self):
    """Runs the scenario; raises `Violation` if an invariant does not hold."""
    cluster = self.cluster
    for learner in range(self.scenario.config.learners):
      cluster.start(learner)
    if self.scenario.finish:
      self.observer.when_finishing = self._break_the_finish
    for fault in self.scenario.faults:
      cluster.run(fault.at_s)
      if cluster.ended:
        break
      self._apply(fault)
    self._heal()
    if self.scenario.shards > 1:
      self._check_that_others_go_on()
    self._check_liveness()

  # The safety phase ---------------------------------------------------------

  def _break_the_finish(self):
    """Injects faults as the run begins to finish, for the first time."""
    sim = self.cluster.sim
    for fault in self.scenario.finish:
      sim.after(fault.at_s, lambda fault=fault: self._apply_late(fault))

  def _apply_late(self, fault: Fault):
    if not self._healed:
      self._apply(fault)

  def _apply(self, fault: Fault):
    if not self.stage.repairs(fault):
      faults.begin(self.stage, fault)

  # The liveness phase -------------------------------------------------------

  def _heal(self):
    """Heals the network, stops losses, and starts every process."""
    cluster = self.cluster
    self._healed = True
    cluster.loss = 0.0
    cluster.timing = dataclasses.replace(cluster.timing, late_share=0.0)
    cluster.wires.throttled.clear()
    cluster.wires.stall_share = 0.0
    cluster.free_disk()
    cluster.resume_syncer()
    if not cluster.syncer.alive:
      cluster.start_syncer()
    for shard, process in cluster.others.items():
      if not process.alive:
        cluster.start_shard(shard)
    for learner, process in sorted(cluster.learners.items()):
      cluster.heal(learner)
      cluster.speak(learner)
      cluster.spoil(learner)
      cluster.resume(learner)
      if process.gone:
        cluster.start(learner)

  def _check_that_others_go_on(self):
    """9: while one shard is away, the fragments of all others are merged."""
    cluster = self.cluster
    first = cluster.syncer.machine.snapshot().versions
    # A learner that starts needs all of Θ: the shard goes once all have begun.
    begun = self._run_until(
      lambda: self._is_ending() or self._got_on(first), self.scenario.bound_s
    )
    if not begun or self._is_ending():
      return  # A learner that is too late for that is found by the next check.
    last = cluster.others[self.scenario.last_shard]
    cluster.kill_shard(last.shard)
    before = cluster.syncer.machine.snapshot().versions
    got_on = self._run_until(
      lambda: self._is_ending() or self._got_on(before, last.fragments),
      self.scenario.bound_s,
    )
    hold(got_on, '9: all wait for one shard', self._why() if not got_on else '')
    if not last.alive:
      cluster.start_shard(last.shard)

  def _is_ending(self) -> bool:
    """Returns True near the run's end, which waits for all shards."""
    return self.cluster.syncer.machine.snapshot().last_round is not None

  def _run_until(self, holds: Callable[[], bool], bound_s: float) -> bool:
    """Runs on until `holds`, the run's end or a bound; returns if it holds."""
    cluster = self.cluster
    until = cluster.sim.now + bound_s
    while not (reached := holds()) and cluster.sim.now < until:
      if cluster.ended:
        break
      cluster.run(cluster.sim.now + LOOK_S)
      self._start_again()
    return reached

  def _check_liveness(self):
    cluster, bound_s = self.cluster, self.scenario.bound_s
    before = cluster.syncer.machine.snapshot().versions
    if self._run_until(lambda: self._got_on(before), bound_s):
      cluster.sim.run(cluster.sim.now + self.scenario.heard_s)
      self.observer.check_at_rest(cluster)
      self._run_to_the_end()
    elif cluster.ended:
      self._check_end()
    else:
      hold(False, f'7: no progress in {bound_s:.0f} s', self._why())

  def _start_again(self):
    """Restarts learners, as the launcher does after they were told to leave."""
    for learner, process in sorted(self.cluster.learners.items()):
      done = process.left is not None and process.left.done
      if process.gone and not done:
        self.cluster.start(learner)

  def _got_on(
    self, before: tuple[int, ...], without: tuple[int, ...] = ()
  ) -> bool:
    """Returns True if all fragments but those `without` advanced twice."""
    snapshot = self.cluster.syncer.machine.snapshot()
    rounds = all(
      now >= then + 2
      for p, (now, then) in enumerate(zip(snapshot.versions, before))
      if p not in without
    )
    members = dict(snapshot.members)
    # Its current session: the syncer may not know yet that a process has left.
    ready = all(
      m in members
      and members[m].incarnation == process.incarnation
      and members[m].ready
      and not members[m].leaving
      and process.machine.snapshot().leave_at_s is None  # It was not preempted.
      for m, process in self.cluster.learners.items()
    )
    lost = {*dict(snapshot.lost), *dict(snapshot.away)} - {*without}
    return rounds and ready and not lost

  def _run_to_the_end(self):
    """7: a run that has an end in sight comes to it."""
    cluster, scenario = self.cluster, self.scenario
    left = scenario.config.total_steps - cluster.syncer.machine.step
    if left > END_IN_SIGHT_STEPS:
      return
    ended = self._run_until(
      lambda: cluster.ended is not None, scenario.end_bound_s(max(left, 0))
    )
    hold(ended, '7: the run does not end', '' if ended else self._why())
    self._check_end()

  def _check_end(self):
    """Checks that every learner leaves once the run is over."""
    sim = self.cluster.sim
    sim.run(sim.now + self.scenario.bound_s)
    waiting = [m for m, x in self.cluster.learners.items() if not x.gone]
    hold(not waiting, 'learners do not leave at the end', waiting)
    self.observer.check_tokens()

  def _why(self) -> str:
    snapshot = self.cluster.syncer.machine.snapshot()
    learners = {
      m: x.machine.snapshot() for m, x in self.cluster.learners.items()
    }
    return f'{snapshot}; {learners}'


def rerun(seed: int) -> str:
  """Returns the command that shows a seed again."""
  return f'python -m diloco.swarm --seed={seed}'


def run(seed: int) -> int:
  """Runs the scenario of a seed; returns the number of events.

  On a failure it first prints how to reproduce it.

  Raises:
    Violation: an invariant does not hold.
  """
  swarm = Swarm(draw(seed))
  whole = False
  try:
    swarm.run()
    whole = True
  finally:
    if not whole:
      print(f'FAILED {swarm.scenario}')
      print(f'rerun: {rerun(seed)}')
  return swarm.observer.events


@dataclasses.dataclass(frozen=True)
class Survey:
  """The results of several seeds.

  Attributes:
    seeds: number of seeds.
    events: number of events of all machines.
    failures: (seed, what failed).
    witnessed: number of seeds, by what they had (`WITNESSED`).
  """

  seeds: int = 0
  events: int = 0
  failures: tuple[tuple[int, str], ...] = ()
  witnessed: Mapping[str, int] = dataclasses.field(default_factory=dict)

  def plus(self, other: 'Survey') -> 'Survey':
    witnessed = collections.Counter(self.witnessed)
    witnessed.update(other.witnessed)
    return Survey(
      self.seeds + other.seeds,
      self.events + other.events,
      self.failures + other.failures,
      witnessed,
    )


def begin_process():
  """Prepares a process of a pool that makes surveys."""
  # Ctrl-C reaches the whole group; its processes end with the first.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  # Scenarios make many values and few cycles; a tenth of the time went into
  # looking for these.
  gc.freeze()
  gc.set_threshold(50_000)


def survey(seeds: Iterable[int]) -> Survey:
  """Runs all of these seeds; a failure does not end it."""
  total = Survey()
  for seed in seeds:
    swarm = Swarm(draw(seed))
    failures = ()
    try:
      swarm.run()
    except TRIPS as error:
      symptom = f'{type(error).__name__}: {error}'[:SYMPTOM_CHARS]
      failures = ((seed, symptom),)
    witnessed = dict.fromkeys(swarm.observer.witnessed, 1)
    one = Survey(1, swarm.observer.events, failures, witnessed)
    total = total.plus(one)
  return total
