# SPDX-License-Identifier: Apache-2.0
"""Random scenarios against the invariants: one seed draws the whole of one.

First a safety phase: anything may die, and the invariants hold after every
event. Then a liveness phase: all heals, and every fragment must advance
within a bound; nobody waits for ever.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable

from diloco.protocol import patience
from diloco.protocol.config import ADMISSIONS, BLENDS, ProtocolConfig
from diloco.sim.cluster import Cluster, Timing
from diloco.sim.invariants import hold
from diloco.sim.onlooker import Onlooker

FAULTS = {
  'kill': 6,
  'kill_donor': 3,  # While a newcomer waits for its state.
  'stop': 4,
  'partition': 4,
  'preempt': 3,
  'outlier': 2,
  'unusable': 2,
  'newcomer': 3,  # An id that was not seen before.
  'syncer': 5,  # Killed, or started again.
  'stop_syncer': 3,  # Stopped, or resumed.
  'lose_disk': 1,  # The syncer's, ledger and all.
}
SHARDS = (1, 2, 4)  # S.
NEWCOMERS_MAX = 2
# A violation, or a machine that trips over itself.
TRIPS = AssertionError, AttributeError, LookupError, TypeError, ValueError
SYMPTOM_CHARS = 200  # Of a failure, in a list of many.
LOOK_S = 1.0  # Between two looks at how far the healed run has come.


@dataclasses.dataclass(frozen=True)
class Fault:
  """What happens to whom; what is broken already is mended instead."""

  at_s: float
  kind: str  # One of FAULTS, or 'shard'.
  learner: int
  notice_s: float
  shard: int = 0


@dataclasses.dataclass(frozen=True)
class Scenario:
  """All that a seed draws but the lengths of single steps."""

  seed: int
  config: ProtocolConfig
  timing: Timing
  loss: float
  checkpoint_rounds: int
  checkpoint_steps: int | None
  faults: tuple[Fault, ...]
  shards: int  # S, the processes of the syncer.
  last_shard: int  # That is mended last: the others go on without it.

  @property
  def bound_s(self) -> float:
    """In which a healed run must get on, whatever had happened before.

    Whoever is silent is found out, twice over (a session and its successor);
    fragments that nobody has are given up; a whole cycle of rounds, and one
    more for those that were under way, at the pace of the slowest.
    """
    floor_s = patience.silence_floor_s(self.config.patience)
    step_s = max(self.timing.step_s.values()) * (1 + 4 * self.timing.jitter)
    cycle_s = (
      self.config.sync_every_steps + self.config.overlap_steps
    ) * step_s
    return 4 * floor_s + 3 * cycle_s + 20 * self.timing.pull_s


def draw(seed: int) -> Scenario:
  """The scenario of a seed."""
  rng = random.Random(seed)
  config = _draw_config(rng)
  ids = config.learners + NEWCOMERS_MAX
  step_s = rng.choice((0.3, 0.6))
  timing = Timing(
    {m: step_s * rng.choice((1.0, 1.0, 1.2, 2.0)) for m in range(ids)},
    jitter=rng.choice((0.0, 0.1, 0.3)),
    latency_s=rng.choice((0.001, 0.01, 0.1, 0.4)),
    transfer_s=rng.choice((0.001, 0.02, 0.2)),
    encode_s=rng.choice((0.001, 0.05)),
    reconnect_s=rng.choice((0.1, 0.5)),
    slow_share=rng.choice((0.0, 0.0, 0.05)),
    **_draw_late_pulls(seed),
  )
  loss = rng.choice((0.0, 0.0, 0.05, 0.3))
  checkpoint_rounds = rng.choice((1, 3, 10))
  checkpoint_steps = rng.choice((None, 3, 10))
  drawn = _draw_faults(rng, ids)
  shards, faults, last_shard = _with_shards(seed, drawn)
  return Scenario(
    seed,
    config,
    timing,
    loss=loss,
    checkpoint_rounds=checkpoint_rounds,
    checkpoint_steps=checkpoint_steps,
    faults=faults,
    shards=shards,
    last_shard=last_shard,
  )


def _draw_late_pulls(seed: int) -> dict[str, float]:
  """Drawn apart, so that the rest of a scenario is what it always was."""
  rng = random.Random(f'late pulls of {seed}')
  return {
    'late_share': rng.choice((0.0, 0.0, 0.1, 0.3)),
    'late_s': rng.choice((0.3, 1.0, 4.0)),
  }


def _with_shards(
  seed: int, faults: tuple[Fault, ...]
) -> tuple[int, tuple[Fault, ...], int]:
  """S, the faults and those of shards, and the shard that is mended last.

  Drawn apart, so that a scenario of one process is what it always was.
  """
  rng = random.Random(f'shards of {seed}')
  shards = rng.choice(SHARDS)
  if shards == 1:
    return shards, faults, 0
  others = range(1, shards)
  until_s = faults[-1].at_s
  of_shards = [
    Fault(rng.uniform(0.0, until_s), 'shard', 0, 0.0, rng.choice(others))
    for _ in range(rng.randint(1, 8))
  ]
  together = sorted([*faults, *of_shards], key=lambda fault: fault.at_s)
  return shards, tuple(together), rng.choice(others)


def _draw_config(rng: random.Random) -> ProtocolConfig:
  learners = rng.choice((1, 2, 2, 3, 3, 4))
  fragments = rng.choice((1, 2, 3))
  every = fragments * rng.choice((1, 2, 3))
  return ProtocolConfig(
    learners=learners,
    fragments=fragments,
    sync_every_steps=every,
    overlap_steps=rng.choice((0, rng.randrange(every), every - 1)),
    quorum=rng.choice((1, learners, rng.randint(1, learners))),
    grace_safety=0.5,
    grace_cap_steps=rng.choice((0.0, 1.0)),
    admission=rng.choice(ADMISSIONS),
    max_staleness_versions=rng.choice((0, 1, 3)),
    weighting='tokens',
    patience=0.3,
    total_steps=rng.choice((12, 30, 10_000, 10_000, 10_000)),
    blend=rng.choice(BLENDS),
  )


def _draw_faults(rng: random.Random, ids: int) -> tuple[Fault, ...]:
  # What comes often differs between scenarios, so that some see it twice.
  weights = [w * rng.choice((0.2, 1.0, 4.0)) for w in FAULTS.values()]
  calm_s = rng.choice((0.3, 1.0, 2.0))
  faults, at_s = [], 0.0
  for _ in range(rng.randint(4, 24)):
    at_s += rng.expovariate(1 / calm_s)
    kind = rng.choices(list(FAULTS), weights)[0]
    learner = rng.randrange(ids - NEWCOMERS_MAX)
    faults.append(Fault(at_s, kind, learner, rng.choice((0.1, 2.0, 6.0))))
  return tuple(faults)


class Swarm:
  """One scenario as it goes."""

  def __init__(self, scenario: Scenario):
    self.scenario = scenario
    self.onlooker = Onlooker(scenario.config)
    self.cluster = Cluster(
      scenario.config,
      scenario.timing,
      scenario.seed,
      loss=scenario.loss,
      watch=self.onlooker,
      checkpoint_rounds=scenario.checkpoint_rounds,
      checkpoint_steps=scenario.checkpoint_steps,
      shards=scenario.shards,
    )

  def run(self):
    """Raises `Violation` where an invariant does not hold."""
    cluster = self.cluster
    for learner in range(self.scenario.config.learners):
      cluster.start(learner)
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

  def _apply(self, fault: Fault):
    cluster, learner = self.cluster, fault.learner
    match fault.kind:
      case 'syncer':
        if cluster.syncer.alive:
          cluster.kill_syncer()
        else:
          cluster.start_syncer()
        return
      case 'stop_syncer':
        if cluster.syncer.stopped:
          cluster.resume_syncer()
        else:
          cluster.stop_syncer()
        return
      case 'shard':
        if cluster.others[fault.shard].alive:
          cluster.kill_shard(fault.shard)
        else:
          cluster.start_shard(fault.shard)
        return
      case 'lose_disk':
        if not cluster.syncer.alive:
          cluster.lose_disk()
        return
      case 'newcomer':
        learner = len(cluster.learners)
        if learner in cluster.timing.step_s:
          cluster.start(learner)
        return
      case 'kill_donor':
        learner = self._donor(otherwise=learner)
    process = cluster.learners[learner]
    if process.gone:
      cluster.start(learner)
    elif process.stopped:
      cluster.resume(learner)
    elif learner in cluster.cut:
      cluster.heal(learner)
    else:
      self._break(fault, learner)

  def _donor(self, otherwise: int) -> int:
    for learner, process in sorted(self.cluster.learners.items()):
      asked = process.machine.snapshot().donations
      if not process.gone and (process.donations or asked):
        return learner
    return otherwise

  def _break(self, fault: Fault, learner: int):
    cluster = self.cluster
    match fault.kind:
      case 'kill' | 'kill_donor':
        cluster.kill(learner)
      case 'stop':
        cluster.stop(learner)
      case 'partition':
        cluster.partition(learner)
      case 'preempt':
        cluster.preempt(learner, fault.notice_s)
      case 'outlier':
        cluster.spoil(learner, stretch=1000.0)
      case 'unusable':
        cluster.spoil(learner, unusable=True)

  # The liveness phase -------------------------------------------------------

  def _heal(self):
    """The network is whole, nothing is lost, every process is up again."""
    cluster = self.cluster
    cluster.loss = 0.0
    cluster.timing = dataclasses.replace(cluster.timing, late_share=0.0)
    cluster.resume_syncer()
    if not cluster.syncer.alive:
      cluster.start_syncer()
    for shard, process in cluster.others.items():
      if not process.alive:
        cluster.start_shard(shard)
    for learner, process in sorted(cluster.learners.items()):
      cluster.heal(learner)
      cluster.spoil(learner)
      cluster.resume(learner)
      if process.gone:
        cluster.start(learner)

  def _check_that_others_go_on(self):
    """9: while one shard is away, the fragments of all others are merged."""
    cluster = self.cluster
    first = cluster.syncer.machine.snapshot().versions
    # Whoever begins needs all of Θ: the shard goes once all have begun.
    self._run_until(lambda: self._is_ending() or self._got_on(first))
    if self._is_ending():
      return
    last = cluster.others[self.scenario.last_shard]
    cluster.kill_shard(last.shard)
    before = cluster.syncer.machine.snapshot().versions
    got_on = self._run_until(
      lambda: self._is_ending() or self._got_on(before, last.fragments)
    )
    hold(got_on, '9: all wait for one shard', self._why() if not got_on else '')
    if not last.alive:
      cluster.start_shard(last.shard)

  def _is_ending(self) -> bool:
    """The end of a run waits for all of its shards."""
    return self.cluster.syncer.machine.snapshot().last_round is not None

  def _run_until(self, holds: Callable[[], bool]) -> bool:
    """Runs on; whether it came to that in the time of the scenario."""
    cluster = self.cluster
    until = cluster.sim.now + self.scenario.bound_s
    while cluster.sim.now < until and not cluster.ended:
      if holds():
        return True
      cluster.run(cluster.sim.now + LOOK_S)
      self._start_again()
    return cluster.ended is not None or holds()

  def _check_liveness(self):
    cluster = self.cluster
    until = cluster.sim.now + self.scenario.bound_s
    before = cluster.syncer.machine.snapshot().versions
    while cluster.sim.now < until and not cluster.ended:
      cluster.run(cluster.sim.now + LOOK_S)
      self._start_again()
      if self._got_on(before):
        timing = self.scenario.timing
        heard_s = 4 * timing.latency_s + 4 * timing.encode_s
        cluster.sim.run(cluster.sim.now + heard_s)
        self.onlooker.check_at_rest(cluster)
        return
    if cluster.ended:
      self._check_end()
      return
    hold(False, f'7: no progress in {self.scenario.bound_s:.0f} s', self._why())

  def _start_again(self):
    """As the launcher would: a learner may have been told to leave."""
    for learner, process in sorted(self.cluster.learners.items()):
      if process.gone and not process.left.done:
        self.cluster.start(learner)

  def _got_on(
    self, before: tuple[int, ...], without: tuple[int, ...] = ()
  ) -> bool:
    """Every fragment twice, but for those `without` a shard."""
    snapshot = self.cluster.syncer.machine.snapshot()
    rounds = all(
      now >= then + 2
      for p, (now, then) in enumerate(zip(snapshot.versions, before))
      if p not in without
    )
    members = dict(snapshot.members)
    ready = all(
      m in members and members[m].ready and not members[m].leaving
      for m in self.cluster.learners
    )
    lost = {*dict(snapshot.lost), *dict(snapshot.away)} - {*without}
    return rounds and ready and not lost

  def _check_end(self):
    """Everybody leaves once the run is over."""
    sim = self.cluster.sim
    sim.run(sim.now + self.scenario.bound_s)
    waiting = [m for m, x in self.cluster.learners.items() if not x.gone]
    hold(not waiting, 'learners do not leave at the end', waiting)

  def _why(self) -> str:
    snapshot = self.cluster.syncer.machine.snapshot()
    learners = {
      m: x.machine.snapshot() for m, x in self.cluster.learners.items()
    }
    return f'{snapshot}; {learners}'


def rerun(seed: int) -> str:
  """The command that shows a seed again."""
  return f'python -m diloco.swarm --seed={seed}'


def run(seed: int) -> int:
  """Runs the scenario of a seed; the number of events.

  Whatever goes wrong, how to see it again is printed first.

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
  return swarm.onlooker.events


@dataclasses.dataclass(frozen=True)
class Survey:
  """What came of several seeds.

  Attributes:
    seeds: how many.
    events: of all machines.
    failures: (seed, what went wrong in it).
  """

  seeds: int = 0
  events: int = 0
  failures: tuple[tuple[int, str], ...] = ()

  def plus(self, other: 'Survey') -> 'Survey':
    return Survey(
      self.seeds + other.seeds,
      self.events + other.events,
      self.failures + other.failures,
    )


def survey(seeds: Iterable[int]) -> Survey:
  """Runs all of these seeds, whatever goes wrong in some of them."""
  total = Survey()
  for seed in seeds:
    swarm = Swarm(draw(seed))
    failures = ()
    try:
      swarm.run()
    except TRIPS as error:
      symptom = f'{type(error).__name__}: {error}'[:SYMPTOM_CHARS]
      failures = ((seed, symptom),)
    total = total.plus(Survey(1, swarm.onlooker.events, failures))
  return total
