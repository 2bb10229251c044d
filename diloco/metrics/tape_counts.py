# SPDX-License-Identifier: Apache-2.0
"""The status of a run that has none, such as one of the lab, from its tape.

The lab writes the tape of a syncer, but has no process of one that would
replace a status once a second.
"""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping

from diloco.metrics import ages as metrics_ages
from diloco.metrics import figures, names
from diloco.metrics.ages import ContributionAges
from diloco.metrics.goodput import Work
from diloco.metrics.recorded_run import RecordedRound, Setup
from diloco.metrics.status import GONE, LIVE, REFUSALS, LearnerStatus, RunStatus
from diloco.metrics.workdir import learner_name


@dataclasses.dataclass
class StepCounts:
  """Sums over the steps of one learner, from the records of its metrics."""

  steps: int = 0
  tokens: float = 0.0
  step_s: float = 0.0
  stall_s: float = 0.0
  stall_max_s: float = 0.0
  last: Mapping = dataclasses.field(default_factory=dict)

  def add(self, record: Mapping, steps: int) -> None:
    """Counts a record, which stands for all steps since the one before."""
    self.steps += steps
    self.tokens += steps * tokens_of(record)
    self.step_s += record[names.STEP_TIME]
    self.stall_s += record[names.STALL_TIME]
    self.stall_max_s = max(self.stall_max_s, record[names.STALL_TIME])
    self.last = record


def tokens_of(record: Mapping) -> float:
  """Returns the tokens of one step, as the learner reported them."""
  return record[names.STEP_TIME] * record.get(names.TOKENS_PER_S, 0.0)


class TapeCounts:
  """Counts over the closed rounds of a run."""

  def __init__(self):
    self._last: RecordedRound | None = None
    self._closed = 0
    self._merged: collections.Counter[int] = collections.Counter()
    self._ages: dict[int, ContributionAges] = collections.defaultdict(
      ContributionAges
    )

  def add(self, closed: RecordedRound) -> None:
    """Counts one round."""
    self._last = closed
    self._closed += 1
    for share in closed.shares:
      self._merged[share.learner] += 1
      if share.age_steps is not None:
        self._ages[share.learner].add(share.age_steps)

  def status(
    self,
    setup: Setup,
    learners: Mapping[str, StepCounts],
    kinds: Mapping[str, int],
    **known,
  ) -> RunStatus | None:
    """Returns a status with the fields that are known; None before a round.

    Args:
      learners: the steps of each, by name.
      kinds: lines of the tape, by their kind.
      known: further fields.
    """
    if self._last is None:
      return None
    ages = metrics_ages.total(self._ages.values())
    over = bool(kinds.get('End', 0))
    return RunStatus(
      run=setup.name,
      step=self._last.step,
      total_steps=setup.total_steps,
      rounds=self._last.number,
      planned=setup.learners,
      fragments=setup.fragments,
      live=tuple(range(setup.learners)),
      participants=tuple(share.learner for share in self._last.shares),
      grace_s=self._last.grace_s,
      sync_s=self._last.sync_s,
      refused=sum(kinds.get(kind, 0) for kind in REFUSALS),
      finished=over,
      age_steps=ages.mean_steps,
      old_share=ages.old_share,
      learners=tuple(
        self._learner(m, learners.get(learner_name(m), StepCounts()), over)
        for m in range(setup.learners)
      ),
      **known,
    )

  def _learner(self, m: int, made: StepCounts, over: bool) -> LearnerStatus:
    return LearnerStatus(
      learner=m,
      state=GONE if over else LIVE,
      steps=made.steps,
      tokens=round(made.tokens) if made.tokens else None,
      loss=made.last.get(names.TRAIN_LOSS),
      tokens_per_s=made.last.get(names.TOKENS_PER_S),
      rounds=self._merged[m],
      participation=figures.participation(self._merged[m], self._closed),
      age_steps=self._ages[m].mean_steps,
      stall_share=made.stall_s / made.step_s if made.step_s else None,
      stall_max_s=made.stall_max_s if made.steps else None,
    )


def heldout_of(records: Iterable[Mapping]) -> dict[str, float]:
  """Returns the fields of the last loss of Θ among learners' metrics."""
  found = [each for each in records if names.EVAL_LOSS in each]
  if not found:
    return {}
  last = max(found, key=lambda each: each[names.TIME])
  step = int(last.get(names.GLOBAL_STEP, last['step']))
  return {'heldout_step': step, 'heldout_loss': last[names.EVAL_LOSS]}


def goodput_of(
  result: pathlib.Path, work: Work | None, last_s: float
) -> float | None:
  """Returns the goodput that the lab leaves at its end, or of the tape.

  Args:
    work: as the tape has it; None: it does not.
    last_s: when the last line was written.

  Raises:
    ValueError: the file is no result.
  """
  if not result.exists():
    return work and work.goodput(last_s)
  try:
    return json.loads(result.read_text())['goodput']
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f'{result}: is no result of a run: {error}') from None
