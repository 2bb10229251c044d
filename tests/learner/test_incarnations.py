# SPDX-License-Identifier: Apache-2.0
"""Checks which process of a learner is the newest, whatever its clock says."""

import time

import pytest

from diloco.learner import connection
from diloco.metrics.jsonl import read_jsonl
from tests.in_process.in_process import Run
from tests.transport.faulty import Faults

pytestmark = pytest.mark.beside

HOUR_NS = 3600 * 10**9


@pytest.fixture
def run(tmp_path):
  run = Run(tmp_path, Faults(), step_floor_s=0.02, total_steps=1_000_000)
  run.start_syncer()
  yield run
  run.close()


@pytest.fixture
def set_back(monkeypatch):
  """Sets the clock of those that start later back by an hour."""

  class Clock:
    def __getattr__(self, name):
      return getattr(time, name)

    def time_ns(self):
      return time.time_ns() - HOUR_NS

  return lambda: monkeypatch.setattr(connection, 'time', Clock())


def test_a_process_comes_back_though_its_clock_was_set_back(run, set_back):
  first = run.start(0)
  run.until_merged(first)
  first.kill()
  first.thread.join()
  set_back()
  second = run.start(0)
  run.until_merged(second)
  assert second.exchange.process == first.exchange.process + 1
  lines = read_jsonl(run.workdir.learner_tape(0))
  [one, other] = [line for line in lines if line['kind'] == 'Begin']
  processes = [first.exchange.process, second.exchange.process]
  assert [one['process'], other['process']] == processes
  # Also before its first step, when it takes in the run's Θ.
  assert lines[lines.index(other) - 1]['kind'] == 'Apply'
  assert {line['process'] for line in lines} == {*processes}


def test_a_process_whose_place_was_taken_does_not_take_it_back(run, set_back):
  first = run.start(0)
  run.until_merged(first)
  set_back()
  second = run.start(0)
  run.until_merged(second)
  run.until(lambda: first.left is not None, 'the older one leaves')
  assert 'which took its place' in first.left.reason
  assert len(run.tape('Greet')) == 2
  run.until_merged(second, rounds=len(run.tape('Publish')) + 2)
  assert len(run.tape('Greet')) == 2
