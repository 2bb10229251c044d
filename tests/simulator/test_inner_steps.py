# SPDX-License-Identifier: Apache-2.0
"""A suspended step is finished afterwards."""

from diloco.simulator.engine import InnerSteps, Simulation


def _made(plan: dict[float, str]) -> tuple[float, list]:
  """Makes one step of 10 s; returns when it ended, and its spans."""
  sim, ends = Simulation(), []
  inner = InnerSteps(
    sim,
    lambda call: call(),
    lambda step_s, spans: ends.append((sim.now, step_s, list(spans))),
  )
  sim.at(0.0, lambda: inner.start(10.0))
  for at_s, what in plan.items():
    sim.at(at_s, inner.suspend if what == 'suspend' else inner.resume)
  sim.run(1000.0)
  [(end_s, step_s, spans)] = ends
  assert step_s == 10.0
  return end_s, spans


def test_a_step_that_nothing_hits():
  assert _made({}) == (10.0, [(0.0, 10.0)])


def test_a_suspended_step_is_finished():
  plan = {4.0: 'suspend', 9.0: 'resume', 12.0: 'suspend', 20.0: 'resume'}
  spans = [(0.0, 4.0), (9.0, 12.0), (20.0, 23.0)]
  assert _made(plan) == (23.0, spans)


def test_a_step_begins_once_nothing_is_suspended():
  sim, ends = Simulation(), []
  inner = InnerSteps(
    sim, lambda call: call(), lambda _, spans: ends.append(spans)
  )
  inner.suspend()
  inner.start(10.0)
  sim.at(3.0, inner.resume)
  sim.run(1000.0)
  assert ends == [[(3.0, 13.0)]]
