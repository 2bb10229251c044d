# SPDX-License-Identifier: Apache-2.0
"""Sections `lab` and `faults`: a run in one process, and planned kills."""

import dataclasses
import re
from collections.abc import Sequence

from diloco import faults
from diloco.config.sections import (
  ConfigError,
  NonNegative,
  Positive,
  Section,
  Share,
  ShareBelow1,
  Whole,
  one_of,
)

PERFORMED = 'kill'  # Of `faults.KINDS`; `diloco chaos` has more.
FORM = 'kill learner N at FRACTION, or kill syncer at FRACTION'


@dataclasses.dataclass(frozen=True)
class LabSystem:
  """A way to train in the lab; `diloco.lab.run` has the programs.

  Attributes:
    has_syncer: True if learners come and go, and a syncer can be killed: the
      protocol's machines. False: one data-parallel program.
    is_elastic: True if one program goes on without the learners that are dead.
    is_alone: True if there is one learner, however many are configured.
  """

  has_syncer: bool = False
  is_elastic: bool = False
  is_alone: bool = False

  def learners(self, configured: int) -> int:
    """Returns how many learners train."""
    return 1 if self.is_alone else configured


SYSTEMS = {
  'decoupled': LabSystem(has_syncer=True),
  'data_parallel': LabSystem(),
  'elastic': LabSystem(is_elastic=True),
  'alone': LabSystem(is_alone=True),
}


@dataclasses.dataclass(frozen=True)
class LabConfig(Section, section='lab'):
  """The section `lab`: settings of a run in one process.

  All times are simulated. Systems: 'decoupled', the protocol's machines;
  'data_parallel', one model on the batches of all learners, which waits for
  dead ones; 'elastic', data-parallel on the batches of the live learners, until
  as many tokens were trained; 'alone', one learner on its own.
  """

  system: one_of(SYSTEMS) = 'decoupled'
  step_s: Positive = 1.0  # Length of an inner step.
  slow_learners: Whole = 0  # How many are slower than the others.
  slow_gap: ShareBelow1 = 0.18  # The share of steps that a slow one lacks.
  # Standard deviation of a step's length, as a share.
  jitter: NonNegative = 0.05
  latency_s: NonNegative = 0.01  # Of a message, one way.
  transfer_s: NonNegative = 0.1  # Of a fragment.
  # Mean time between a learner's deaths; 0: none.
  mtbf_steps: NonNegative = 0.0
  away_steps: NonNegative = 20.0  # For how long a dead learner is away.
  # Data-parallel stands when its group changes: with a death and, if elastic,
  # with a return.
  pause_steps: NonNegative = 2.0
  # The last so many learners are there for a part of the run; they leave with
  # notice, as a preempted machine does.
  visitors: Whole = 0
  visit_from: Share = 0.0  # Share of total_steps at which visitors start.
  visit_until: Share = 1.0  # Share at which they are told to leave.
  # Global steps between evaluations; 0: at the end.
  eval_every_steps: Whole = 0
  # Learners add the rounding error of an offer that was merged to their next
  # one, as the syncer does to its updates (codec.error_feedback).
  up_feedback: bool = False
  # Share of the run, at its start, that is data-parallel: all learners begin
  # with its parameters and moments. Nothing fails before that.
  start_fraction: ShareBelow1 = 0.0
  # Share of the run, at its end, over whose global steps the global model is
  # averaged; the average is evaluated beside it. 0: no average.
  average_fraction: Share = 0.0
  # Held-out batches of `run.eval_batch` sequences of the evaluation at the end;
  # 0: all of the held-out text.
  final_eval_batches: Whole = 0
  # Global steps between checkpoints, from which an interrupted run resumes: all
  # processes stop there and start again, in every run. 0: none.
  checkpoint_steps: Whole = 5000

  def broken_rules(self):
    if self.visit_from >= self.visit_until:
      yield (
        f'visit_until={self.visit_until}: must be more than '
        f'visit_from={self.visit_from}'
      )
    system = SYSTEMS.get(self.system)
    if self.start_fraction and system and not system.has_syncer:
      yield (
        f'start_fraction={self.start_fraction}: must be 0, '
        f'system={self.system!r} is data-parallel from start to end'
      )
    if self.visitors and system and not system.has_syncer:
      yield (
        f'visitors={self.visitors}: must be 0, system={self.system!r} can not '
        'have any'
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


def plan(texts: Sequence[str], learners: int) -> tuple[Kill, ...]:
  """The faults in the order in which they are due.

  Raises:
    ConfigError: names each fault that can't be read or can't happen.
  """
  kills, problems = [], []
  for i, text in enumerate(texts):
    try:
      kills.append(_parse(text, learners))
    except ValueError as error:
      problems.append(f'faults[{i}]={text!r}: {error}')
  if problems:
    raise ConfigError(problems)
  return tuple(sorted(kills, key=lambda kill: (kill.fraction, kill.process)))


def _parse(text: str, learners: int) -> Kill:
  kind = text.partition(' ')[0]
  if kind in faults.KINDS and kind != PERFORMED:
    raise ValueError(f'a run performs {PERFORMED!r}, not {kind!r}')
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
