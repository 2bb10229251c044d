# SPDX-License-Identifier: Apache-2.0
"""A state is drawn, given and taken over with no second copy of it."""

from tests.learner import state_memory

MILLIONS = 20
STATE = 12  # θ and two moments in f32, in bytes a parameter.


def test_a_state_is_passed_on_without_a_copy_of_it():
  """Beyond what a learner takes anyway there is less than a moment's room."""
  gives, takes = state_memory.measured(MILLIONS)
  assert gives['gives'] - gives['give'] < STATE / 2, gives
  peak = max(takes[name] for name in ('fetches', 'adopts', 'begins'))
  assert peak - takes['take'] < STATE / 4, takes
