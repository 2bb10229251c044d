# SPDX-License-Identifier: Apache-2.0
"""Decoupled DiLoCo on a fleet: the real machines, with scheduled faults."""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping

from diloco.fleets.failures import Death, FaultEvents
from diloco.fleets.speeds import Speeds
from diloco.fleets.tally import LearnerCount, Tally
from diloco.metrics.ages import total as ages_total
from diloco.protocol.config import ProtocolConfig
from diloco.simulator.cluster import Cluster, ClusterOptions, Timing
from diloco.simulator.network import SYNCER, Links, Meter, Network


@dataclasses.dataclass(frozen=True)
class Fleet:
  """The speeds of learners."""

  # Duration of an inner step, by learner id; as many as may ever join.
  step_s: tuple[float, ...]
  # Tokens of an inner step with all slices, by learner id.
  tokens: tuple[int, ...]
  # Standard deviation of a step's length, as a share of it.
  jitter: float = 0.0


class DecoupledFleet:
  """One simulation, as it goes, and its figures so far.

  Attributes:
    tally: counts what happened.
    learners: counts by id.

  Args:
    timeline_s: events before this time are kept for a picture.
  """

  def __init__(
    self,
    config: ProtocolConfig,
    fleet: Fleet,
    network: Network,
    seed: int,
    timeline_s: float = 0.0,
  ):
    rng = random.Random(seed)
    self.tally = Tally(timeline_s)
    self._wires = Links(network, window_s=max(fleet.step_s))
    self.cluster = Cluster(
      config,
      Timing(
        dict(enumerate(fleet.step_s)),
        latency_s=network.latency_s,
        encode_s=network.encode_s,
        merge_s=network.merge_s,
        reconnect_s=network.reconnect_s,
      ),
      seed,
      observer=self.tally,
      options=ClusterOptions(
        checkpoint_rounds=config.fragments,
        wires=self._wires,
        speeds={
          # Each has its own stream of draws: no learner affects another's.
          m: Speeds(step_s, fleet.jitter, random.Random(rng.random())).next_s
          for m, step_s in enumerate(fleet.step_s)
        },
        batch_of=lambda learner, _: fleet.tokens[learner],
        row_tokens=1,
      ),
    )
    self._config = config
    self._suspended: set[int] = set()
    self._capacity: dict[int, float] = {}

  @property
  def now_s(self) -> float:
    return self.cluster.sim.now

  def schedule(self, fault_events: FaultEvents):
    """Schedules faults; without this call there are none."""
    sim = self.cluster.sim
    for learner, suspensions in sorted(fault_events.suspensions.items()):
      for each in suspensions:
        sim.at(each.begin_s, lambda m=learner: self._suspend(m))
        sim.at(each.end_s, lambda m=learner: self._go_on(m))
    for learner, shares in sorted(fault_events.capacities.items()):
      for at_s, share in shares:
        sim.at(at_s, lambda m=learner, x=share: self._set_capacity(m, x))
    for death in fault_events.deaths:
      self._schedule_death(death)

  def join(self, learner: int):
    """Starts a learner's process, which says hello."""
    self.cluster.start(learner)
    process = self.cluster.learners[learner]
    process.capacity = self._capacity.get(learner, 1.0)
    if learner in self._suspended:
      process.pause()

  def leave(self, learner: int, notice_s: float):
    """Tells a learner to leave."""
    self.cluster.preempt(learner, notice_s)

  def run(
    self, until_s: float, stop: Callable[[], bool] = lambda: False
  ) -> None:
    """Runs up to a time, to the end of the run, or until `stop()` is true."""
    cluster = self.cluster
    cluster.sim.run(until_s, stop=lambda: cluster.ended is not None or stop())
    self.tally.settle()

  def count_anew(self):
    """Lets the figures be of what comes from now on."""
    self.tally = self.cluster.observer = Tally()

  # Figures -------------------------------------------------------------------

  @property
  def learners(self) -> dict[int, LearnerCount]:
    ids = sorted({*self.cluster.learners, *self.tally.learners})
    return {m: self.tally.count(m) for m in ids}

  @property
  def steps(self) -> int:
    return sum(count.steps for count in self.learners.values())

  @property
  def rounds(self) -> int:
    """Number of merged rounds."""
    return self.tally.rounds

  @property
  def goodput(self) -> float:
    """Goodput by `metrics.goodput`, of slices: a missing one counts as idle."""
    return self.tally.goodput(self._config.learners, self.now_s)

  @property
  def uptime(self) -> float:
    """Share of the time in which at least one learner stepped."""
    return self.tally.uptime(self.now_s)

  @property
  def pace(self) -> float:
    """Rounds per round that the fastest learner's steps would make due."""
    most = max((c.steps for c in self.learners.values()), default=0)
    return self.rounds * self._config.spacing_steps / most if most else 0.0

  @property
  def meters(self) -> Mapping[tuple[int, str], Meter]:
    """The links that were used, by process and 'in' or 'out'.

    Their peaks are of the busiest window of one inner step.
    """
    return self._wires.meters()

  def participation(self, learner: int) -> float:
    """Returns the share of the rounds that included the learner."""
    return self.tally.participation(learner) or 0.0

  def staleness(self, learner: int) -> float:
    """Returns how many versions its merged offers' bases were behind, mean."""
    count = self.tally.count(learner)
    return count.staleness / count.merged if count.merged else 0.0

  def record(self) -> dict[str, float | None]:
    """Returns the figures that tables show, by name."""
    counts = self.learners.values()
    merged = sum(count.merged for count in counts)
    staleness = sum(count.staleness for count in counts)
    ages = ages_total(count.ages for count in counts)
    return {
      'goodput': self.goodput,
      'uptime': self.uptime,
      'pace': self.pace,
      'merges_per_hour': 3600.0 * self.rounds / self.now_s,
      'grace_s': self.tally.grace_s / self.rounds if self.rounds else 0.0,
      'participation': self.tally.mean_participation(len(counts)),
      'staleness': staleness / merged if merged else None,
      'age': ages.mean_steps,
      'old': ages.old_share,
    }

  # What befalls it -----------------------------------------------------------

  def _suspend(self, learner: int):
    self._suspended.add(learner)
    process = self.cluster.learners.get(learner)
    if process is not None and not process.gone:
      process.pause()

  def _go_on(self, learner: int):
    self._suspended.discard(learner)
    process = self.cluster.learners.get(learner)
    if process is not None and not process.gone:
      process.go_on()

  def _set_capacity(self, learner: int, share: float):
    self._capacity[learner] = share
    process = self.cluster.learners.get(learner)
    if process is not None:
      process.capacity = share

  def _schedule_death(self, death: Death):
    sim = self.cluster.sim
    if death.process == SYNCER:
      sim.at(death.at_s, self.cluster.kill_syncer)
      if math.isfinite(death.back_at_s):
        sim.at(death.back_at_s, self.cluster.start_syncer)
      return
    sim.at(death.at_s, lambda: self._kill(death.process))
    if math.isfinite(death.back_at_s):
      sim.at(death.back_at_s, lambda: self._come_back(death.process))

  def _kill(self, learner: int):
    process = self.cluster.learners.get(learner)
    if process is not None and not process.gone:
      self.cluster.kill(learner)

  def _come_back(self, learner: int):
    process = self.cluster.learners.get(learner)
    if process is None or process.gone:
      self.join(learner)


def run(
  config: ProtocolConfig,
  fleet: Fleet,
  network: Network,
  fault_events: FaultEvents,
  seed: int,
  until_s: float,
  timeline_s: float = 0.0,
) -> DecoupledFleet:
  """Runs a whole simulation, whose learners all start at 0.

  Args:
    config: `config.learners` are allocated all the time.
    timeline_s: events before this time are kept for a picture.
  """
  decoupled = DecoupledFleet(config, fleet, network, seed, timeline_s)
  for learner in range(config.learners):
    decoupled.join(learner)
  decoupled.schedule(fault_events)
  decoupled.run(until_s)
  return decoupled
