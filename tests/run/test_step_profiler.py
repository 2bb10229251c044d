# SPDX-License-Identifier: Apache-2.0
"""Traces of inner steps: of which steps, and what is written."""

import pytest

from diloco.run.step_profiler import StepProfiler


@pytest.fixture(name='traced')
def fixture_traced(monkeypatch):
  """Steps that were traced, a list for each trace; `step` makes them."""
  traced, begun = [], []

  def stop():
    if broken:
      raise RuntimeError('No profile started')
    traced.append(begun.pop())

  broken = []
  monkeypatch.setattr('jax.profiler.start_trace', lambda _: begun.append([]))
  monkeypatch.setattr('jax.profiler.stop_trace', stop)

  class Steps:
    made = 0
    found = traced
    fails = broken

    def step(self, profiler, count):
      for _ in range(count):
        self.made += 1
        profiler.before_step()
        for each in begun:
          each.append(self.made)

  return Steps()


def test_steps_from_the_given_one_on(traced, tmp_path):
  traced.step(StepProfiler(tmp_path, 3, 2), 9)
  assert traced.found == [[3, 4]]


def test_none_unless_asked(traced, tmp_path):
  profiler = StepProfiler(tmp_path, 0, 3)
  traced.step(profiler, 4)
  profiler.ask()
  traced.step(profiler, 4)
  profiler.ask()
  traced.step(profiler, 4)
  assert traced.found == [[5, 6, 7], [9, 10, 11]]


def test_asking_during_a_trace_does_nothing(traced, tmp_path):
  profiler = StepProfiler(tmp_path, 1, 3)
  traced.step(profiler, 2)
  profiler.ask()
  traced.step(profiler, 8)
  assert traced.found == [[1, 2, 3]]


def test_the_end_writes_what_there_is(traced, tmp_path):
  profiler = StepProfiler(tmp_path, 2, 5)
  traced.step(profiler, 3)
  profiler.close()
  profiler.close()
  assert traced.found == [[2, 3]]


def test_a_trace_that_fails_does_not_stop_training(traced, tmp_path):
  profiler = StepProfiler(tmp_path, 1, 1)
  traced.fails.append(True)
  traced.step(profiler, 3)
  assert traced.found == []
