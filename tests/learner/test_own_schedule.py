# SPDX-License-Identifier: Apache-2.0
"""A learner whose schedule follows its own steps, over its own death."""

import collections

import pytest

from diloco.learner.train_state import DoubleBuffer
from diloco.metrics import names
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import learner_name
from diloco.protocol.incarnation import process_of
from tests.in_process.in_process import Living, Run
from tests.transport.faulty import Faults

pytestmark = pytest.mark.beside


def test_the_recorded_rate_is_that_of_the_step(tmp_path, monkeypatch):
  """A learner that lost its disk goes on where its reports ended, not anew."""
  taken = collections.defaultdict(list)  # By learner: first row and rate.
  step = DoubleBuffer.step

  def recorded_step(holder, params, state, batch, lr, draw):
    taken[draw[0]].append((draw[1], float(lr)))
    return step(holder, params, state, batch, lr, draw)

  monkeypatch.setattr(DoubleBuffer, 'step', recorded_step)
  run = Run(
    tmp_path,
    Faults(),
    step_floor_s=0.02,
    checkpoint={'learner_every_steps': 0},
    progress='own',
    total_steps=600,
  )
  run.start_syncer()
  first = run.start(0)
  run.until_merged(first)
  other = run.start(1)  # From t, which it counts nothing of.
  first.kill()
  first.thread.join()
  before = len(taken[0])
  again = run.start(0)
  run.join()
  schedule = run.run_spec.schedule()
  batch = run.run_spec.config.data.batch
  for steps in taken.values():
    assert [rate for _, rate in steps] == [
      schedule(x // batch) for x, _ in steps
    ]
  assert taken[0][before][0] > 0
  assert taken[1][0][0] == 0
  lives = {first: taken[0][:before], again: taken[0][before:], other: taken[1]}
  for living, steps in lives.items():
    told = _told(run, living)
    assert told == [rate for _, rate in steps][: len(told)]
    # One that is killed has not told of its last steps.
    assert len(told) >= len(steps) - 2 > 0


def _told(run: Run, living: Living) -> list[float]:
  """The rates that a process has recorded, step by step."""
  records = read_jsonl(run.workdir.metrics(learner_name(living.learner)))
  return [
    record[names.LEARNING_RATE]
    for record in records
    if process_of(int(record[names.INCARNATION])) == living.exchange.process
  ]
