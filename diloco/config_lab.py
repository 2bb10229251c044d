# SPDX-License-Identifier: Apache-2.0
"""Types and rules of the keys of section `lab`: a run in one process."""

import dataclasses

from diloco import config_values as values

LAB_SYSTEMS = ('decoupled', 'data_parallel', 'elastic', 'alone')


@dataclasses.dataclass(frozen=True)
class LabConfig(values.Section):
  """The section `lab`: what a run in one process is to look like.

  Attributes:
    system: 'decoupled': the protocol's machines; 'data_parallel': one model on
      the batches of all learners, who wait for the dead; 'elastic': the same
      on the batches of those alive, until as many tokens were trained; 'alone':
      one learner on its own.
    step_s: simulated length of an inner step.
    slow_learners: how many of the learners are slower.
    slow_gap: the share of steps that a slow learner lacks.
    jitter: standard deviation of a step's length, as a share of it.
    latency_s: of a message, one way.
    transfer_s: of a fragment.
    mtbf_steps: mean time between two deaths of a learner, in steps; 0: none.
    away_steps: for how long a dead learner is away.
    pause_steps: how long data-parallel stands still, besides, when its group
      changes: with a death and, elastic, with a return.
    visitors: how many of the learners, the last ones, are there only for a
      while; they go as a preempted machine does, with notice.
    visit_from: the share of total_steps at which they start.
    visit_until: and at which they are told to go.
    eval_every_steps: of the global step, between two evaluations; 0: only at
      the end.
    final_eval_batches: held-out batches, of `run.eval_batch` sequences, of the
      evaluation at the end; 0: all of the held-out text.
    checkpoint_steps: of the global step, between two checkpoints, from which a
      run that was cut goes on; 0: none.
  """

  SECTION = 'lab'

  system: str
  step_s: float
  slow_learners: int
  slow_gap: float
  jitter: float
  latency_s: float
  transfer_s: float
  mtbf_steps: float
  away_steps: float
  pause_steps: float
  visitors: int
  visit_from: float
  visit_until: float
  eval_every_steps: int
  final_eval_batches: int
  checkpoint_steps: int

  def broken_rules(self):
    yield from self._one_of('system', LAB_SYSTEMS)
    yield from self._positive('step_s')
    yield from self._at_least(0, 'slow_learners', 'jitter', 'latency_s')
    yield from self._at_least(0, 'transfer_s', 'mtbf_steps', 'away_steps')
    yield from self._at_least(0, 'pause_steps')
    yield from self._at_least(0, 'eval_every_steps', 'checkpoint_steps')
    yield from self._at_least(0, 'visitors', 'final_eval_batches')
    yield from self._share('slow_gap', one=False)
    yield from self._share('visit_from', 'visit_until')
    if self.visit_from >= self.visit_until:
      yield (
        f'visit_until={self.visit_until}: must be more than '
        f'visit_from={self.visit_from}'
      )
    if self.visitors and self.system != 'decoupled':
      yield (
        f"visitors={self.visitors}: only system='decoupled' can have some, not "
        f'{self.system!r}'
      )
