# SPDX-License-Identifier: Apache-2.0
"""Data-parallel in the lab: one model on the batches of several learners.

Every system trains total_steps · M batches; an elastic one in more and smaller
steps if learners die. A learner takes its batches in order and loses none.
"""

import functools
from collections.abc import Callable, Sequence

from diloco.config_faults import Kill
from diloco.lab.group_arrays import GroupArrays
from diloco.lab.group_steps import GroupStep, GroupSteps
from diloco.lab.journal import Journal
from diloco.lab.lives import Lives
from diloco.lab.resumption import Resumption
from diloco.lab.trained import Point, Trained
from diloco.metrics import goodput, names
from diloco.metrics.workdir import learner_name
from diloco.runtime.blueprint import Blueprint
from diloco.sim.tally import Tally


class Together:
  """One run of data-parallel; arguments are those of `Decoupled`."""

  def __init__(
    self,
    blueprint: Blueprint,
    kills: Sequence[Kill],
    tell: Callable[[int, float], None],
    timeline_s: float,
    journal: Journal,
    resumption: Resumption,
  ):
    config = blueprint.config
    lab = config.lab
    self._config = config
    self._resumption = resumption
    self._answers = resumption.answers
    self._kills = list(kills)
    self._tell = tell
    self._timeline_s = timeline_s
    self._journal = journal
    self._learners = 1 if lab.system == 'alone' else config.protocol.learners
    self._group = GroupSteps(
      Lives(config),
      self._learners,
      lab.step_s * lab.pause_steps,
      elastic=lab.system == 'elastic',
    )
    self._schedule = blueprint.schedule()
    self._arrays = GroupArrays(blueprint, self._learners)
    self._batches = [0] * self._learners  # Number trained by each learner.
    self._steps = 0
    self._told = 0  # Reported deaths of the group.
    self._coming: list[tuple[float, int]] = []  # (time of return, learner).
    self._points: list[Point] = []
    self._tally = Tally(timeline_s)

  def run(self) -> Trained:
    total = self._config.protocol.total_steps
    every = self._config.lab.eval_every_steps or total
    for learner in range(self._learners):
      self._journal.happened(0.0, learner_name(learner), 'started')
    look_at = every
    checkpoints = list(self._resumption.steps(total))
    while self._step < total:
      while self._kills and self._kills[0].is_due(self._step, total):
        self._group.kill(self._kills.pop(0).learner)
      self._make(self._group.step())
      self._tell_of_deaths()
      if look_at <= self._step < total:
        self._look()
        look_at += every
      if checkpoints and checkpoints[0] <= self._step < total:
        self._resumption.at(checkpoints.pop(0), self._arrays)
    self._look(final=True)
    works = [
      goodput.LearnerWork(m, joined_s=0.0, process=0, made_s=count.useful_s)
      for m, count in self._tally.learners.items()
    ]
    return Trained(
      points=tuple(self._points),
      steps=sum(self._batches) // self._learners,
      rounds=0,
      participation=sum(self._batches) / (self._steps * self._learners),
      goodput=goodput.share(works, self._learners, 0.0, self._group.now_s),
      parameters=self._arrays.parameters(),
      tally=self._tally,
      deaths=tuple(self._group.deaths),
      merged_tokens=self._tally.tokens,
    )

  @property
  def _step(self) -> int:
    """The global step t: steps of as many tokens as all learners have."""
    return sum(self._batches) // self._learners

  def _make(self, step: GroupStep):
    """Makes a step that takes no more batches than are left."""
    total = self._config.protocol.total_steps * self._learners
    members = step.members[: total - sum(self._batches)]
    positions = {m: self._batches[m] for m in members}
    lr = self._schedule(self._step)
    loss = self._answers.of(
      f'step of {len(members)}',
      lambda: self._arrays.step(positions, lr, self._steps),
    )
    self._steps += 1
    for m in members:
      self._batches[m] += 1
    self._count(step, members)
    self._write(step, members, loss, lr)

  def _count(self, step: GroupStep, members: Sequence[int]):
    data = self._config.data
    for m, length_s in zip(members, step.lengths_s):
      count, span = (
        self._tally.count(m),
        (step.begin_s, step.begin_s + length_s),
      )
      count.steps += 1
      count.stepping_s += length_s
      count.useful_s += length_s
      count.tokens += data.batch * data.seq_len
      self._tally.tokens += data.batch * data.seq_len
      self._tally.stepping.add([span])
      if span[1] <= self._timeline_s:
        self._tally.steps_spans.append((m, *span))

  def _write(
    self, step: GroupStep, members: Sequence[int], loss: float, lr: float
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
      self._journal.stepped(m, self._batches[m], scalars)

  def _tell_of_deaths(self):
    """Reports the deaths so far, and the learners that are back."""
    for learner, dies_s, back_s in self._group.deaths[self._told :]:
      self._journal.happened(dies_s, learner_name(learner), 'killed')
      self._coming.append((back_s, learner))
    self._told = len(self._group.deaths)
    for back_s, learner in sorted(self._coming):
      if back_s <= self._group.now_s:
        self._journal.happened(back_s, learner_name(learner), 'started')
        self._coming.remove((back_s, learner))

  def _look(self, final: bool = False):
    seen = functools.partial(self._arrays.seen, final)
    point = Point(
      step=self._step,
      tokens=self._tally.tokens,
      learners_loss=float('nan'),
      at_s=self._group.now_s,
      **self._answers.of('look', seen),
    )
    self._points.append(point)
    self._tell(point.step, point.loss)
    self._journal.evaluated(point)
