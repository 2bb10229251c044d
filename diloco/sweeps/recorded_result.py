# SPDX-License-Identifier: Apache-2.0
"""The result of a run of processes, read from the run's own records."""

import bisect
import dataclasses
import math
import statistics
from collections.abc import Iterator

from diloco.config.run_config import RunConfig
from diloco.metrics import figures, recorded_run, token_ledger
from diloco.metrics.jsonl import CorruptLine, read_jsonl
from diloco.metrics.recorded_run import NoReport, RecordedRun
from diloco.metrics.workdir import Workdir
from diloco.sweeps import code
from diloco.sweeps.sweep import BadResult, SeedResult

CurvePoint = tuple[int, int, float]  # Global step, tokens, loss.


def read(workdir: Workdir, config: RunConfig) -> SeedResult:
  """Returns the result of a run that is over and was evaluated.

  The mean of the learners' parameters is not evaluated in a run of processes:
  its loss is NaN. Goodput and wall time count from the first ready learner to
  the end, the time between an interruption and its resumption included.

  Raises:
    BadResult: a record is missing or broken; names it.
  """
  try:
    run = recorded_run.read(workdir.root)
    rows = token_ledger.rows_of(
      workdir, config.protocol.fragments, config.protocol.blend
    )
    delays = list(_delays(workdir))
  except (NoReport, CorruptLine, OSError) as error:
    raise BadResult(str(error)) from None
  if run.problem:
    raise BadResult(run.problem)
  for path in (workdir.summary, workdir.evaluation):
    if not path.exists():
      raise BadResult(f'{path}: is missing, so the run did not come to its end')
  # A summary of an older version does not say how many learners were planned.
  status = dataclasses.replace(run.status, planned=config.protocol.learners)
  evaluation = run.evaluation
  tokens = token_ledger.total(rows.values())
  fragments = config.protocol.fragments  # Each has a ledger of its own.
  end = status.step, round(tokens.trained / fragments), evaluation.final_loss
  shown = figures.shown(figures.RUN, figures.SWEEP)
  values = {each.name: each.value(status) for each in shown}
  return SeedResult(
    loss=evaluation.final_loss,
    learners_loss=math.nan,
    curve=((0, 0, evaluation.initial_loss), *_points(run, end), end),
    rounds=status.rounds,
    participation=values['participation'],
    goodput=values['goodput'],
    wall_s=values['elapsed_s'],
    merged_tokens=round(tokens.merged / fragments),
    age_steps=values['age_steps'],
    old_share=values['old_share'],
    delay_steps=statistics.fmean(delays) if delays else None,
    unexplained_tokens=token_ledger.unexplained(rows.values()),
    code=code.fingerprint(),
  )


def _points(run: RecordedRun, end: CurvePoint) -> Iterator[CurvePoint]:
  """Yields the evaluations before the end, in the order of their steps.

  Tokens are those of all steps that were made when the evaluated Θ was
  published; where the learners wrote none of their steps, the share of the
  global steps.
  """
  ends_s = [step.end_s for step in run.steps]
  total_steps, total_tokens, _ = end
  newest = 0
  # Those of the evaluator, without the run's first and last Θ.
  evaluated = {int(step): loss for _, step, loss in run.heldout[1:-1]}
  for step, loss in sorted(evaluated.items()):
    if not 0 < step < total_steps:
      continue
    at_s = max((x.at_s for x in run.rounds if x.step <= step), default=0.0)
    share = step / total_steps
    if ends_s:
      share = bisect.bisect_right(ends_s, at_s) / len(ends_s)
    newest = max(newest, round(share * total_tokens))
    yield step, newest, loss


def _delays(workdir: Workdir) -> Iterator[int]:
  """Yields the steps between each copy and the update that includes it."""
  for path in sorted(workdir.tapes.glob('learner-*.jsonl')):
    copied: dict[tuple[int, int, int], int] = {}
    for line in read_jsonl(path):
      if line['kind'] not in ('Snapshot', 'Apply'):
        continue
      name = line['process'], line['fragment'], line['handle']
      if line['kind'] == 'Snapshot':
        copied[name] = line['step']
      elif name in copied:
        yield line['step'] - copied[name]
