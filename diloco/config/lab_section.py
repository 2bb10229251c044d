# SPDX-License-Identifier: Apache-2.0
"""Sections `lab` and `faults`: a run in one process, and planned kills."""

import dataclasses
import re
from collections.abc import Sequence

from diloco.config import sections
from diloco.config.sections import ConfigError

LAB_SYSTEMS = ('decoupled', 'data_parallel', 'elastic', 'alone')
FORM = 'kill learner N at FRACTION, or kill syncer at FRACTION'


@dataclasses.dataclass(frozen=True)
class LabConfig(sections.Section):
  """The section `lab`: settings of a run in one process.

  Attributes:
    system: 'decoupled': the protocol's machines; 'data_parallel': one model on
      the batches of all learners, which waits for dead ones; 'elastic':
      data-parallel on the batches of the live learners, until as many tokens
      were trained; 'alone': one learner on its own.
    step_s: simulated length of an inner step.
    slow_learners: number of slower learners.
    slow_gap: share of steps that a slow learner lacks.
    jitter: standard deviation of a step's length, as a share of it.
    latency_s: latency of a message, one way.
    transfer_s: duration of a fragment's transfer.
    mtbf_steps: mean time between two deaths of a learner, in steps; 0: none.
    away_steps: how long a dead learner is away.
    pause_steps: additional pause of data-parallel when its group changes: with
      a death and, if elastic, with a return.
    visitors: number of learners, the last ones, that are there only for a part
      of the run; they leave with notice, as a preempted machine does.
    visit_from: share of total_steps at which they start.
    visit_until: share of total_steps at which they are told to leave.
    eval_every_steps: global steps between two evaluations; 0: only at the end.
    final_eval_batches: held-out batches, of `run.eval_batch` sequences, of the
      evaluation at the end; 0: all of the held-out text.
    checkpoint_steps: global steps between two checkpoints, from which an
      interrupted run resumes; 0: none.
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


# The faults that are injected into a run: which process is killed, and
# when.


@dataclasses.dataclass(frozen=True)
class Kill:
  """SIGKILL for one process once the run has come so far."""

  process: str  # 'syncer', or such as 'learner-0'.
  fraction: float  # Of total_steps.

  @property
  def learner(self) -> int | None:
    """The learner's id; None for the syncer."""
    _, dash, number = self.process.partition('-')
    return int(number) if dash else None

  def is_due(self, step: int, total_steps: int) -> bool:
    return step >= self.fraction * total_steps


def plan(faults: Sequence[str], learners: int) -> tuple[Kill, ...]:
  """The faults in the order in which they are due.

  Raises:
    ConfigError: names each fault that can't be read or can't happen.
  """
  kills, problems = [], []
  for i, text in enumerate(faults):
    try:
      kills.append(_parse(text, learners))
    except ValueError as error:
      problems.append(f'faults[{i}]={text!r}: {error}')
  if problems:
    raise ConfigError(problems)
  return tuple(sorted(kills, key=lambda kill: (kill.fraction, kill.process)))


def _parse(text: str, learners: int) -> Kill:
  match = re.fullmatch(r'kill (syncer|learner (\d+)) at (\d*\.?\d+)', text)
  if not match:
    raise ValueError(f'expected {FORM}')
  fraction = float(match[3])
  if not 0 <= fraction < 1:
    raise ValueError(f'the fraction is {fraction}, must be in [0, 1)')
  if match[2] is None:
    return Kill(match[1], fraction)
  learner = int(match[2])
  if learner >= learners:
    raise ValueError(f'learner {learner} of {learners}, ids start at 0')
  return Kill(f'learner-{learner}', fraction)
