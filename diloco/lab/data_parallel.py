# SPDX-License-Identifier: Apache-2.0
"""Data-parallel in the lab: one model on the batches of several learners.

Every system trains total_steps · M batches; an elastic one in more and smaller
steps if learners die. Rows come in the run's order, and none is lost.
"""

import dataclasses
import functools
import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diloco.config.lab_section import SYSTEMS
from diloco.data import pipeline
from diloco.fleets.tally import Tally
from diloco.lab.failure_schedule import FailureSchedule
from diloco.lab.outputs import LabRun, Trained
from diloco.lab.process_arrays import on_device, on_host
from diloco.learner.programs import StepPrograms, devices_of
from diloco.metrics import figures, names
from diloco.metrics import goodput as metrics_goodput
from diloco.metrics.workdir import learner_name
from diloco.run.spec import RunSpec

# Schedules data-parallel's steps and their members while learners die.
#
# All learners are one group: a step ends with the slowest of its members. A
# death undoes the step in progress. Then
#
# * a group that waits stands until the dead learner is back, plus one pause;
# * an elastic group pauses, continues with the remaining learners, and pauses
#   once more at the end of a step when a learner is back.
#
# A learner that dies while the group stands is replaced meanwhile and costs
# nothing, as in the simulator (`diloco.fleets.failures`).


@dataclasses.dataclass(frozen=True)
class DataParallelStep:
  """One step that was finished; times in simulated seconds."""

  members: tuple[int, ...]  # Learners whose batches it takes, ascending.
  begin_s: float
  end_s: float  # End of the slowest member.
  lengths_s: tuple[float, ...]  # Duration of each member.


class DataParallelSteps:
  """Makes the steps, one after another.

  Attributes:
    now_s: end of the last step.
    deaths: those that cost something: (learner, death, return).

  Args:
    elastic: True if the group goes on with fewer.
  """

  def __init__(
    self,
    failure_schedule: FailureSchedule,
    learners: int,
    pause_s: float,
    elastic: bool,
  ):
    self.now_s = 0.0
    self.deaths: list[tuple[int, float, float]] = []
    self._failures = failure_schedule
    self._learners = learners
    self._pause_s = pause_s
    self._elastic = elastic
    self._away: dict[int, float] = {}  # By learner, the time of its return.
    # (time, order of the draw, learner): deaths. Later ones are drawn at the
    # time of the return, the order in which `FailureSchedule` wants them.
    self._coming: list[tuple[float, int, int, float | None]] = []
    self._drawn = 0
    if failure_schedule.mortal:
      for learner in range(learners):
        self._draw(learner, 0.0)

  def step(self) -> DataParallelStep:
    """Returns the next finished step."""
    self._take_back()
    while True:
      members = [m for m in range(self._learners) if m not in self._away]
      if not members:
        self._stand(min(self._away.values()))
        continue
      begin_s = self.now_s
      lengths_s = tuple(
        self._failures.speeds[m].next_s(begin_s) for m in members
      )
      end_s = begin_s + max(lengths_s)
      died = self._next_death(end_s, members)
      if died is None:
        self.now_s = end_s
        return DataParallelStep(tuple(members), begin_s, end_s, lengths_s)
      self._die(*died)

  def kill(self, learner: int):
    """Kills a learner between two steps; it is away as long as any."""
    if learner not in self._away:
      self._die(learner, self.now_s, self.now_s + self._failures.away_s)

  def _die(self, learner: int, dies_s: float, back_s: float):
    self.now_s = dies_s
    self.deaths.append((learner, dies_s, back_s))
    if self._elastic:
      self._away[learner] = back_s
      self._stand(dies_s)
    else:
      self._stand(back_s)

  def _take_back(self):
    if any(back_s <= self.now_s for back_s in self._away.values()):
      self._stand(self.now_s)

  def _stand(self, until_s: float):
    """Stands until a time and for one pause; then all present learners join."""
    self.now_s = max(self.now_s, until_s) + self._pause_s
    self._next_death(self.now_s, ())
    self._away = {m: x for m, x in self._away.items() if x > self.now_s}

  def _next_death(
    self, until_s: float, members
  ) -> tuple[int, float, float] | None:
    """Returns the next death of a member; those of others are skipped."""
    while self._coming and self._coming[0][0] < until_s:
      at_s, _, learner, back_s = heapq.heappop(self._coming)
      if back_s is None:
        self._draw(learner, at_s)
        continue
      self._expect(back_s, learner, None)
      if learner in members:
        return learner, at_s, back_s
    return None

  def _draw(self, learner: int, from_s: float):
    dies_s, back_s = self._failures.death(from_s)
    self._expect(dies_s, learner, back_s)

  def _expect(self, at_s: float, learner: int, back_s: float | None):
    heapq.heappush(self._coming, (at_s, self._drawn, learner, back_s))
    self._drawn += 1


class DataParallelArrays:
  """The model that all learners share.

  Attributes:
    params: path -> array; the next step donates the arrays.
  """

  def __init__(self, run_spec: RunSpec, learners: int):
    self._run_spec = run_spec
    self._dataset = run_spec.dataset(0, learners=1)
    self._programs = functools.cache(self._make_programs)
    self._all = self._programs(learners)
    self.params, self._inner = self._all.init(run_spec.initial_parameters())

  def step(self, start: int, members: int, lr: float, number: int) -> float:
    """Makes one step on as many batches as there are members.

    Args:
      start: number of the first row.

    Returns:
      The loss over all these batches.
    """
    rows = members * self._run_spec.config.data.batch
    batch = pipeline.batch_at(self._dataset, start, rows)
    programs = self._programs(members)
    self.params, self._inner, metrics = programs.step(
      self.params, self._inner, programs.put_batch(batch), lr, (0, number)
    )
    return float(metrics['loss'])

  def save(self) -> tuple[Any, Any]:
    """Returns parameters and inner state, on the host."""
    return on_host(self.params), on_host(self._inner)

  def restore(self, saved: tuple[Any, Any]):
    """Restores what `save` returned."""
    params, inner = saved
    self.params = on_device(params, self._all.params_like)
    self._inner = on_device(inner, self._all.state_like)

  def _make_programs(self, members: int) -> StepPrograms:
    """Compiles a step on the batches of `members` learners."""
    config = self._run_spec.config
    data = dataclasses.replace(config.data, batch=members * config.data.batch)
    config = dataclasses.replace(config, data=data)
    run_spec = dataclasses.replace(self._run_spec, config=config)
    return StepPrograms(run_spec, devices_of(config))


class DataParallel(LabRun):
  """One run of data-parallel."""

  _KEPT = (
    '_kills', '_group', '_batches', '_steps', '_reported', '_coming',
    '_tally', '_look_at',
  )  # fmt: skip

  def _set_up(self, run_spec: RunSpec, timeline_s: float):
    config = run_spec.config
    lab = config.lab
    system = SYSTEMS[lab.system]
    self._learners = system.learners(config.protocol.learners)
    self._group = DataParallelSteps(
      FailureSchedule(config),
      self._learners,
      lab.step_s * lab.pause_steps,
      elastic=system.is_elastic,
    )
    self._schedule = run_spec.schedule()
    self._arrays = DataParallelArrays(run_spec, self._learners)
    self._batches = [0] * self._learners  # Number trained by each learner.
    self._steps = 0
    self._reported = 0  # Reported deaths of the group.
    self._coming: list[tuple[float, int]] = []  # (time of return, learner).
    self._tally = Tally(timeline_s)

  def run(self) -> Trained:
    total = self._config.protocol.total_steps
    every = self._config.lab.eval_every_steps or total
    self._look_at = every
    saves = [
      step
      for step in self._checkpoints.steps(total)
      if step > self._checkpoints.from_step
    ]
    if self._checkpoints.state is not None:
      self._go_on(self._checkpoints.state)
    else:
      for learner in range(self._learners):
        self._observer.happened(0.0, learner_name(learner), 'started')
    while self._step < total:
      while self._kills and self._kills[0].is_due(self._step, total):
        self._group.kill(self._kills.pop(0).learner)
      before = self._step
      self._make(self._group.step())
      if self._step > max(before, self._average_from()):
        self._add_to_average()
      self._tell_of_deaths()
      if self._look_at <= self._step < total:
        self._look()
        self._look_at += every
      if saves and saves[0] <= self._step < total:
        self._go_on(self._checkpoints.save(saves.pop(0), self._state()))
    self._look(final=True)
    works = [
      metrics_goodput.LearnerWork(
        m, joined_s=0.0, process=0, made_s=count.useful_s
      )
      for m, count in self._tally.learners.items()
    ]
    return Trained(
      points=tuple(self._points),
      steps=sum(self._batches) // self._learners,
      rounds=0,
      participation=figures.participation(
        sum(self._batches), self._steps, self._learners
      ),
      goodput=metrics_goodput.share(
        works, self._learners, 0.0, self._group.now_s
      ),
      parameters={p: np.asarray(x) for p, x in self._arrays.params.items()},
      tally=self._tally,
      deaths=tuple(self._group.deaths),
      merged_tokens=self._tally.tokens,
    )

  def _state(self) -> dict[str, Any]:
    return super()._state() | {'arrays': self._arrays.save()}

  def _go_on(self, state: dict[str, Any]):
    self._arrays.restore(state['arrays'])
    super()._go_on(state)

  @property
  def _step(self) -> int:
    """The global step t: steps of as many tokens as all learners have."""
    return sum(self._batches) // self._learners

  @property
  def _now_s(self) -> float:
    return self._group.now_s

  def _make(self, step: DataParallelStep):
    """Makes a step that takes no more batches than are left."""
    total = self._config.protocol.total_steps * self._learners
    members = step.members[: total - sum(self._batches)]
    lr = self._schedule(self._step)
    start = sum(self._batches) * self._config.data.batch
    loss = self._arrays.step(start, len(members), lr, self._steps)
    self._steps += 1
    for m in members:
      self._batches[m] += 1
    self._count(step, members)
    self._write(step, members, loss, lr)

  def _count(self, step: DataParallelStep, members: Sequence[int]):
    data = self._config.data
    for m, length_s in zip(members, step.lengths_s):
      count = self._tally.count(m)
      count.steps += 1
      count.stepping_s += length_s
      count.useful_s += length_s
      count.tokens += data.batch * data.seq_len
      self._tally.tokens += data.batch * data.seq_len
      self._tally.stepping.add([(step.begin_s, step.begin_s + length_s)])

  def _write(
    self, step: DataParallelStep, members: Sequence[int], loss: float, lr: float
  ):
    """Records a step; the loss is over all its batches."""
    data, step_s = self._config.data, step.end_s - step.begin_s
    for m, length_s in zip(members, step.lengths_s):
      scalars = {
        names.TIME: step.end_s,
        names.INCARNATION: 0,
        names.GLOBAL_STEP: self._step,
        names.TRAIN_LOSS: loss,
        names.LEARNING_RATE: lr,
        names.STEP_TIME: step_s,
        names.STALL_TIME: step_s - length_s,
        names.TOKENS_PER_S: data.batch * data.seq_len / step_s,
      }
      self._observer.stepped(m, self._batches[m], scalars)

  def _tell_of_deaths(self):
    """Reports the deaths so far, and the learners that are back."""
    for learner, dies_s, back_s in self._group.deaths[self._reported :]:
      self._observer.happened(dies_s, learner_name(learner), 'killed')
      self._coming.append((back_s, learner))
    self._reported = len(self._group.deaths)
    for back_s, learner in sorted(self._coming):
      if back_s <= self._group.now_s:
        self._observer.happened(back_s, learner_name(learner), 'started')
        self._coming.remove((back_s, learner))

  def _parameters(self) -> Mapping[str, Any]:
    return self._arrays.params
