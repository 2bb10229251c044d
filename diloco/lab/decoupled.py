# SPDX-License-Identifier: Apache-2.0
"""Decoupled DiLoCo in the lab: the real machines around real arrays.

Synchronous and streaming DiLoCo are settings of it; see
`experiments/baselines.py`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from diloco.config import unlike
from diloco.config.lab_section import Kill
from diloco.fleets.tally import Tally
from diloco.lab.data_parallel import DataParallelArrays
from diloco.lab.failure_schedule import FailureSchedule, TransientLearners
from diloco.lab.outputs import LabObserver, LabRun, Trained
from diloco.lab.process_arrays import ArrayBackend, Beginning
from diloco.metrics import ages, names, token_ledger
from diloco.metrics.workdir import learner_name
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.learner import events as learner_events
from diloco.protocol.syncer import events as syncer_events
from diloco.run import choices, event_log
from diloco.run.spec import RunSpec
from diloco.simulator.cluster import (
  Cluster,
  ClusterOptions,
  SavedCluster,
  Timing,
)
from diloco.simulator.observer import TokenObserver

HORIZON_FACTOR = 100.0  # A run that takes this much longer than planned hangs.
REST_STEPS = 3.0  # In which learners finish their step before a checkpoint.


class ObservedTally(Tally):
  """A tally that also forwards to an observer.

  Attributes:
    ledger: where each learner's tokens went.
  """

  def __init__(
    self,
    timeline_s: float,
    fragments: int,
    observer: LabObserver,
    run_spec: RunSpec,
    before: int,
  ):
    super().__init__(timeline_s)
    self._before = before  # Steps of each learner before the first one.
    self.ledger = TokenObserver(fragments)
    self._observer = observer
    self._run_spec = run_spec
    self._schedule = run_spec.schedule()
    self._publishing: syncer_events.Publish | None = None

  def state(self) -> dict[str, Any]:
    """Returns the counts for a checkpoint, of processes that are saved."""
    self.rest()
    self.ledger.rest()
    parts = '_observer', '_run_spec', '_schedule', '_before'
    return {k: x for k, x in vars(self).items() if k not in parts}

  def go_on(self, state: dict[str, Any]):
    """Restores what `state` returned."""
    vars(self).update(state)

  def at_syncer(self, syncer, event, effects):
    super().at_syncer(syncer, event, effects)
    self.ledger.at_syncer(syncer, event, effects)
    for effect in effects:
      match effect:
        case syncer_events.Merge():
          self._decided(syncer.now, effect)
        case syncer_events.Publish():
          self._publishing = effect  # Its line has the resulting CRC.
        case (
          syncer_events.LogDecision()
          | syncer_events.LogReformed()
          | syncer_events.End()
          | syncer_events.AdmitLearner()
        ):
          self._decided(syncer.now, effect)
    self._now_s = syncer.now

  def theta(self, fragment: int, version: int, crc: int):
    published, self._publishing = self._publishing, None
    if published is not None:
      self._decided(self._now_s, published, crc=crc)

  def at_learner(self, process, event, effects):
    super().at_learner(process, event, effects)
    self.ledger.at_learner(process, event, effects)
    if isinstance(event, learner_events.Completed):
      progress = self._run_spec.progress(
        process.stepped_at + self._before,
        process.rows // process.batch - 1 + self._before,
      )
      scalars = {
        names.TIME: process.now,
        names.INCARNATION: process.incarnation,
        names.GLOBAL_STEP: process.machine.global_step + self._before,
        names.TRAIN_LOSS: event.loss,
        names.LEARNING_RATE: self._schedule(progress),
        names.STEP_TIME: event.step_s,
        names.STALL_TIME: 0.0,
        names.TOKENS_PER_S: event.tokens / event.step_s,
      }
      self._observer.stepped(process.id, process.steps, scalars)

  def _decided(self, at_s: float, effect: syncer_events.Effect, **more):
    fields = dataclasses.asdict(effect) | more
    self._observer.decided(at_s, event_log.kind_of(effect), fields)


class Decoupled(LabRun):
  """One run of Decoupled DiLoCo in the lab."""

  _KEPT = (
    '_deaths', '_failures', '_transient', '_planned', '_agenda',
  )  # fmt: skip

  def _set_up(self, run_spec: RunSpec, timeline_s: float):
    config = run_spec.config
    protocol = config.protocol
    beginning = self._beginning(run_spec)
    self._before = beginning.steps
    self._tally = ObservedTally(
      timeline_s, protocol.fragments, self._observer, run_spec, self._before
    )
    self._tally.tokens = self._tokens_before
    # The syncer's rounds are those after the beginning.
    self._protocol = dataclasses.replace(
      protocol, total_steps=protocol.total_steps - self._before
    )
    of_rounds = dataclasses.replace(config, protocol=self._protocol)
    run_spec = dataclasses.replace(run_spec, outer=choices.outer(of_rounds))
    self._deaths: list[tuple[int, float, float]] = []
    self._failures = FailureSchedule(config)
    self._transient = TransientLearners(config)
    self._configs = [
      setup.config for setup in unlike.setups(config, config.data.shards)
    ]
    self._backend = ArrayBackend(run_spec, self._configs, beginning)
    self._planned = 0  # How much of the plan is done.
    # What is to come: time, name of a method and its arguments.
    self._agenda: list[tuple[float, str, tuple]] = []
    self._horizon_s = (
      HORIZON_FACTOR * protocol.total_steps * max(self._failures.steps_s)
    )

  def _beginning(self, run_spec: RunSpec) -> Beginning:
    """Trains data-parallel for `lab.start_fraction`, if nobody has."""
    config, state = run_spec.config, self._checkpoints.state
    steps = round(config.lab.start_fraction * config.protocol.total_steps)
    if not steps:
      return Beginning(run_spec.initial_parameters())
    if state is not None:
      return state['beginning']
    learners, schedule = config.protocol.learners, run_spec.schedule()
    arrays = DataParallelArrays(run_spec, learners)
    rows = learners * config.data.batch
    for step in range(steps):
      arrays.step(step * rows, learners, schedule(step), step)
    return Beginning(*arrays.save(), steps)

  @property
  def _tokens_before(self) -> int:
    """Tokens that all learners' rows had before they began."""
    data, learners = self._config.data, self._config.protocol.learners
    return self._before * learners * data.batch * data.seq_len

  def _make_cluster(self, saved: SavedCluster | None) -> Cluster:
    config, lab, protocol = self._config, self._config.lab, self._protocol
    return Cluster(
      dataclasses.replace(protocol, total_steps=announced_step(protocol)),
      Timing(
        dict(enumerate(self._failures.steps_s)),
        latency_s=lab.latency_s,
        transfer_s=lab.transfer_s,
        encode_s=0.01 * lab.step_s,
        merge_s=0.01 * lab.step_s,
      ),
      config.seed,
      observer=self._tally,
      contents=self._backend,
      options=ClusterOptions(
        checkpoint_rounds=config.checkpoint.syncer_every_rounds,
        speeds={m: own.next_s for m, own in self._failures.speeds.items()},
        batch_of=lambda learner, _: self._configs[learner].data.batch,
        row_tokens=config.data.seq_len,
      ),
      saved=saved,
    )

  def run(self) -> Trained:
    protocol = self._config.protocol
    if self._checkpoints.state is not None:
      self._go_on(self._checkpoints.state)
    else:
      self._begin()
    plan = self._plan()
    while self._planned < len(plan):
      target, do = plan[self._planned]
      self._planned += 1
      self._run_to(target)
      if not self._cluster.ended:
        do()
    self._run_to(math.inf)
    if self._config.lab.average_fraction:
      self._add_to_average()  # The last step ends the run.
    self._look(final=True)
    self._tally.settle()
    cluster, counts = self._cluster, self._tally.learners.values()
    learner_s = self._transient.learner_s(self._now_s)
    rounds = self._tally.rounds
    merged = ages.total(count.ages for count in counts)
    merged_tokens = sum(count.merged_tokens for count in counts)
    rows = self._tally.ledger.rows().values()
    return Trained(
      points=tuple(self._points),
      steps=sum(count.steps for count in counts),
      rounds=rounds,
      participation=self._tally.mean_participation(protocol.learners),
      goodput=sum(count.useful_s for count in counts) / learner_s,
      parameters=cluster.syncer.contents.model.parameters(),
      tally=self._tally,
      deaths=tuple(self._deaths),
      merged_tokens=(
        self._tokens_before + round(merged_tokens / protocol.fragments)
      ),
      tokens=token_ledger.total(rows),
      unexplained_tokens=token_ledger.unexplained(rows),
      age_steps=merged.mean_steps,
      old_share=merged.old_share,
    )

  def _plan(self) -> list[tuple[float, Callable[[], None]]]:
    """Returns what to do when t reaches which step."""
    total = self._config.protocol.total_steps
    every = self._config.lab.eval_every_steps
    looks = range(every, total, every) if every else ()
    planned = [(float(step), self._look) for step in looks]
    averaged = range(self._average_from() + 1, total)
    planned += [(float(step), self._add_to_average) for step in averaged]
    planned += [
      (float(step), functools.partial(self._save, step))
      for step in self._checkpoints.steps(total)
      if step > self._before
    ]
    planned += [
      (kill.fraction * total, functools.partial(self._strike, kill))
      for kill in self._kills
    ]
    transient = self._transient
    if transient.visitors:
      planned.append((transient.from_step, self._welcome_visitors))
    if transient.visitors and transient.until_step < total:
      planned.append((transient.until_step, self._dismiss_visitors))
    return sorted(planned, key=lambda each: each[0])

  def _run_to(self, step: float):
    """Runs until t is `step`, or the run has ended."""
    self._run_until(lambda: self._step >= step)

  def _run_until(self, holds: Callable[[], bool]):
    cluster = self._cluster
    cluster.sim.run(
      self._horizon_s, stop=lambda: cluster.ended is not None or holds()
    )
    assert cluster.sim.now < self._horizon_s, f'hangs at step {self._step}'

  @property
  def _step(self) -> int:
    return self._before + self._cluster.syncer.machine.step

  @property
  def _now_s(self) -> float:
    return self._cluster.sim.now

  def _parameters(self) -> Mapping[str, Any]:
    return self._cluster.syncer.contents.model.parameters()

  def _learners_mean(self) -> Mapping[str, Any]:
    learners = [
      process.contents.params
      for process in self._cluster.learners.values()
      if process.alive
    ]
    return {
      path: np.mean([np.asarray(x[path]) for x in learners], axis=0)
      for path in (learners[0] if learners else ())
    }

  # Beginning and going on ---------------------------------------------------

  def _begin(self):
    self._cluster = self._make_cluster(None)
    learners = range(self._config.protocol.learners)
    if self._failures.mortal:
      for learner in learners:
        self._live(learner, 0.0)
    self._observer.happened(0.0, 'syncer', 'started')
    for learner in learners:
      self._start(learner)  # A visitor starts only if it is due by now.

  def _save(self, step: int):
    """Lets all come to rest and saves them; they go on from what was saved."""
    cluster = self._cluster
    # One that was killed is first given back what it had lost.
    self._run_until(
      lambda: cluster.syncer.alive and cluster.syncer.machine.whole
    )
    cluster.resting = True
    rested_s = cluster.sim.now + REST_STEPS * max(self._failures.steps_s)
    self._run_until(lambda: cluster.at_rest or cluster.sim.now >= rested_s)
    if cluster.ended is None:
      self._go_on(self._checkpoints.save(step, self._state()))

  def _state(self) -> dict[str, Any]:
    learners = self._cluster.learners
    return super()._state() | {
      'beginning': self._backend.beginning if self._before else None,
      'alive': [m for m in sorted(learners) if not learners[m].gone],
      'cluster': self._cluster.save(),
      'tally': self._tally.state(),  # After that, which saves their steps.
    }

  def _go_on(self, state: dict[str, Any]):
    super()._go_on(state)
    self._tally.go_on(state['tally'])
    self._cluster = self._make_cluster(state['cluster'])
    for learner in state['alive']:
      self._cluster.start(learner)
    # One that dies later comes back without a checkpoint of its own.
    self._cluster.saved.clear()
    agenda, self._agenda = self._agenda, []
    for when_s, name, args in agenda:
      self._at(when_s, name, *args)

  def _at(self, when_s: float, name: str, *args):
    """Schedules a call of the method of that name; checkpoints keep it."""
    self._agenda.append((when_s, name, args))

    def call():
      self._agenda.remove((when_s, name, args))
      getattr(self, name)(*args)

    self._cluster.sim.at(when_s, call)

  # Deaths -------------------------------------------------------------------

  def _live(self, learner: int, from_s: float):
    """Schedules a learner's deaths as a Poisson process.

    The next life begins once the learner is back.
    """
    dies_s, back_s = self._failures.death(from_s)
    self._at(dies_s, '_die', learner, back_s)
    self._at(back_s, '_come_back', learner, back_s)

  def _come_back(self, learner: int, back_s: float):
    self._start(learner)
    self._live(learner, back_s)

  def _strike(self, kill: Kill):
    """Kills a process, unless it is dead or has left already."""
    now_s, learner = self._now_s, kill.learner
    back_s = now_s + self._failures.away_s
    if learner is not None:
      self._die(learner, back_s)
      self._at(back_s, '_start', learner)
    elif self._cluster.syncer.alive:
      self._cluster.kill_syncer()
      self._observer.happened(now_s, 'syncer', 'killed')
      self._at(back_s, '_start_syncer')

  def _die(self, learner: int, back_s: float):
    process = self._cluster.learners.get(learner)  # A visitor may not be there.
    if process is not None and not process.gone:
      now_s = self._now_s
      self._cluster.kill(learner)
      self._deaths.append((learner, now_s, back_s))
      self._observer.happened(now_s, learner_name(learner), 'killed')

  def _start(self, learner: int):
    """Starts a process for the learner.

    It does nothing if one is alive, the learner is not due, or the run has
    ended.
    """
    now_s = self._now_s
    old = self._cluster.learners.get(learner)
    free = old is None or old.gone
    expected = self._transient.expects(learner, now_s)
    if free and expected and not self._cluster.ended:
      self._cluster.start(learner)
      self._observer.happened(now_s, learner_name(learner), 'started')

  def _welcome_visitors(self):
    self._transient.begin(self._now_s)
    for learner in self._transient.visitors:
      self._start(learner)

  def _dismiss_visitors(self):
    """Makes the visitors leave with notice, as if preempted."""
    now_s = self._now_s
    self._transient.end(now_s)
    for learner in self._transient.visitors:
      process = self._cluster.learners.get(learner)
      if process is not None and not process.gone:
        self._cluster.preempt(learner, self._transient.notice_s)
        self._observer.happened(now_s, learner_name(learner), 'stopped')

  def _start_syncer(self):
    self._cluster.start_syncer()
    self._observer.happened(self._now_s, 'syncer', 'started')


def announced_step(protocol: ProtocolConfig) -> int:
  """Returns the step at which the syncer announces the end of the run.

  A learner hears of it within its next step, and hands in what it has at the
  boundary after that: with τ > 0 that of the following step, which has been
  dispatched by then (see `diloco.learner.train_loop`). The syncer announces the
  end this many steps earlier, so that t ends at `total_steps` as in every other
  system. A learner that waits at its boundary (τ = 0) hands in there.
  """
  total, spacing = protocol.total_steps, protocol.spacing_steps
  if protocol.overlap_steps:
    return max(1, total - 2)
  return total if total % spacing == 0 else max(1, total - 1)
