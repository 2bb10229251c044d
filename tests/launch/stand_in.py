# SPDX-License-Identifier: Apache-2.0
"""Small real processes that stand for syncer, learner and evaluation.

  python stand_in.py ROLE WORKDIR STEPS [learner id]

A learner leaves when the syncer's summary is there. The syncer waits at a
quarter of the run for all learners, and at three quarters for a second
incarnation of learner 1. Nothing else of a run is imitated.
"""

import pathlib
import sys
import time

from diloco.metrics import names, status
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import Workdir, learner_name
from diloco.metrics.writer import JsonlWriter
from tests.waiting import until

LEARNERS = 3
STEP_S = 0.02
DEADLINE_S = 120.0


def syncer(workdir, steps):
  for step in range(1, steps + 1):
    write_status(workdir, step, steps, finished=False)
    if step == steps // 4:
      all_seen = lambda: all(incarnations(workdir, i) for i in range(LEARNERS))  # noqa: E731
      until(all_seen, DEADLINE_S, 'all learners make steps')
    if step == 3 * steps // 4:
      again = lambda: len(incarnations(workdir, 1)) > 1  # noqa: E731
      until(again, DEADLINE_S, 'learner 1 is back')
    time.sleep(STEP_S)  # The step itself.
  write_status(workdir, steps, steps, finished=True)
  learners = tuple(
    status.LearnerStatus(
      learner=i,
      steps=steps,
      tokens=steps * 1024,
      rounds=7,
      participation=7 / 8,
      incarnations=1 + i,
      beginning='at step 0, inner state from the seed',
      stall_max_s=0.012,
      bytes_up=500,
      bytes_down=700,
    )
    for i in range(LEARNERS)
  )
  status.write_summary(
    workdir.summary,
    status.RunStatus(
      run='stand-in',
      step=steps,
      total_steps=steps,
      rounds=8,
      fragments=4,
      elapsed_s=2.0,
      goodput=0.9,
      uptime=1.0,
      refused=1,
      pulls_up=24,
      pulls_down=24,
      bytes_up=3300,
      bytes_down=3300,
      finished=True,
      learners=learners,
    ),
  )


def write_status(workdir, step, total_steps, finished):
  learners = tuple(
    status.LearnerStatus(
      learner=i,
      state=status.LIVE,
      steps=step,
      loss=5.0 / step,
      tokens_per_s=1e4,
      round=3,
      lag_versions=0,
      bytes_up=10**6,
      bytes_down=2000,
      participation=0.9,
      incarnations=1,
      stall_max_s=0.01,
    )
    for i in range(LEARNERS)
  )
  status.write_status(
    workdir.status,
    status.RunStatus(
      run='stand-in', time_s=time.time(), step=step, total_steps=total_steps,
      rounds=3, live=(0, 1, 2), participants=(0, 2), grace_s=0.25,
      elapsed_s=1.0, goodput=0.87, uptime=1.0, bytes_up=3 * 10**6,
      bytes_down=6000, refused=0, finished=finished, learners=learners,
    ),
  )  # fmt: skip


def incarnations(workdir, i):
  records = read_jsonl(workdir.metrics(learner_name(i)))
  return {record[names.INCARNATION] for record in records}


def learner(workdir, i):
  incarnation = len(incarnations(workdir, i)) + 1
  writer = JsonlWriter(workdir.metrics(learner_name(i)))
  step = 0
  while not workdir.summary.exists():
    step += 1
    now = status.read_status(workdir.status)
    scalars = {
      names.TIME: time.time(),
      names.INCARNATION: incarnation,
      names.GLOBAL_STEP: now.step if now else 0,
      names.TRAIN_LOSS: 1 + 4 / step,
    }
    writer.write_scalars(step, scalars)
    time.sleep(STEP_S)  # The step itself.


def evaluate(workdir):
  evaluation = status.Evaluation(3000, 5.55, 1.9, 2.43, 3.2)
  status.write_evaluation(workdir.evaluation, evaluation)


def main(role, root, steps, i=0):
  workdir = Workdir(pathlib.Path(root))
  match role:
    case 'syncer':
      syncer(workdir, int(steps))
    case 'learner':
      learner(workdir, int(i))
    case 'evaluate':
      evaluate(workdir)
    case 'broken':
      print('the reason of the stand-in')
      raise SystemExit(int(i))


if __name__ == '__main__':
  main(*sys.argv[1:])
