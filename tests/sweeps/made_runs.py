# SPDX-License-Identifier: Apache-2.0
"""The records of a short run of two learners, written by hand.

Eight steps of a second each, of which the syncer merged those before the offers
at step 4 (both learners, fragment 0) and at step 6 (learner 0, fragment 1).
"""

import dataclasses
import json

from diloco.config.run_config import RunConfig
from diloco.metrics import files, names, status
from diloco.metrics.workdir import EVALUATOR, Workdir, learner_name
from diloco.protocol.incarnation import incarnation_of

STEPS = 8
PROCESS = 5
TOKENS = 128  # Of a step: 4 sequences of 32.
BEGIN_S = 1000.0


def write(workdir: Workdir, config: RunConfig, loss: float):
  """Writes what a run that ended with `loss` has left."""
  workdir.root.mkdir(parents=True, exist_ok=True)
  files.write_json(workdir.config, dataclasses.asdict(config))
  files.write_json(workdir.pids, {'launcher': 1, 'processes': {}})
  _lines(workdir.events, [])
  for learner in (0, 1):
    _lines(workdir.metrics(learner_name(learner)), _scalars())
    _lines(workdir.learner_tape(learner), _tape(learner))
  _lines(
    workdir.tape,
    [
      {'time_s': BEGIN_S, 'kind': 'ready'},
      _publish(5.0, 1, 0, 4, [(0, 4), (1, 4)]),
      _publish(7.0, 2, 1, 6, [(0, 6)]),
      {'time_s': BEGIN_S + 8, 'kind': 'End'},
    ],
  )
  _lines(
    workdir.metrics(EVALUATOR),
    [
      {'time_s': BEGIN_S + at_s, 'step': step, names.EVAL_LOSS: found}
      for at_s, step, found in ((6.5, 4, 5.0), (9.0, STEPS, loss))
    ],
  )
  learners = tuple(
    status.LearnerStatus(
      learner=m,
      steps=STEPS,
      tokens=STEPS * TOKENS,
      rounds=2 - m,
      participation=1 - m / 2,
      incarnations=1,
      stall_max_s=0.1,
    )
    for m in (0, 1)
  )
  ages = 5 / 4, 5 / 4, 7 / 4  # Of the merged offers, in steps.
  summary = status.RunStatus(
    run='made', step=STEPS, total_steps=STEPS, rounds=2, fragments=2,
    elapsed_s=8.5, goodput=0.75, uptime=1.0, refused=0, finished=True,
    age_steps=sum(ages) / 3, old_share=1 / 3, learners=learners,
  )  # fmt: skip
  status.write_summary(workdir.summary, summary)
  evaluation = status.Evaluation(3000, 6.0, loss, None, None)
  status.write_evaluation(workdir.evaluation, evaluation)


def _lines(path, lines):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(''.join(json.dumps(line) + '\n' for line in lines))


def _scalars():
  incarnation = incarnation_of(PROCESS, 1)
  return [
    {
      names.TIME: BEGIN_S + step,
      'step': step,
      names.STEP_TIME: 1.0,
      names.STALL_TIME: 0.0,
      names.INCARNATION: incarnation,
    }
    for step in range(1, STEPS + 1)
  ]


def _tape(learner: int):
  def line(step: int, kind: str, **fields):
    at_s = BEGIN_S + step
    return {'time_s': at_s, 'kind': kind, 'process': PROCESS, 'step': step} | (
      fields
    )

  def apply(step: int, fragment: int):
    return line(
      step, 'Apply', fragment=fragment, handle=1, carry=True,
      overwritten_tokens=0,
    )  # fmt: skip

  taken_in = [apply(8, 1)] if learner == 0 else []
  return [
    line(0, 'Begin', source={'kind': 'seed', 'process': 0}),
    line(4, 'Snapshot', fragment=0, handle=1),
    line(6, 'Snapshot', fragment=1, handle=1),
    apply(7, 0),
    *taken_in,
    line(8, 'Cease'),
  ]


def _publish(at_s: float, number: int, fragment: int, step: int, merged):
  return {
    'time_s': BEGIN_S + at_s, 'kind': 'Publish', 'round': number,
    'fragment': fragment, 'version': 1, 'step': step, 'sync_s': 0.1,
    'shares': [
      {
        'learner': learner, 'incarnation': incarnation_of(PROCESS, 1),
        'weight': 1 / len(merged), 'handle': 1, 'age_s': 0.5,
        'age_steps': at_s / 4, 'base_version': 0,
        'c_tokens': own * TOKENS, 'c_steps': own, 'step': own,
      }
      for learner, own in merged
    ],
  }  # fmt: skip
