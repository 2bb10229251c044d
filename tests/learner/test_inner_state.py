# SPDX-License-Identifier: Apache-2.0
"""An inner optimizer state on the host, and back, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco.learner import host_parts
from diloco.numerics import boxes

PARAMS = {'a': jnp.arange(5.0), 'b': jnp.ones((2, 3))}


def _state(optimizer):
  """Returns a state after two steps, so that no leaf is all zeros."""
  state = optimizer.init(PARAMS)
  for _ in range(2):
    _, state = optimizer.update(PARAMS, state, PARAMS)
  return state


@pytest.mark.parametrize(
  'optimizer',
  [optax.adamw(0.1), optax.sgd(0.1), optax.sgd(0.1, momentum=0.9)],
  ids=['adamw', 'sgd', 'momentum'],
)
def test_a_state_comes_back_to_the_bit(optimizer):
  """SGD without momentum has an empty state."""
  state = _state(optimizer)
  found = host_parts.place(host_parts.to_host(state), state)
  assert jax.tree.structure(found) == jax.tree.structure(state)
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(state)):
    np.testing.assert_array_equal(one, np.asarray(other))


@pytest.mark.parametrize('values_max', [1, 7, 12, 100, 1000])
def test_boxes_are_cut_into_runs_of_their_values(values_max):
  """Whatever fits, one after another, in row-major order."""
  tensor = np.arange(6 * 5 * 40).reshape(6, 5, 40)
  box = (1, 6), (0, 5), (3, 37)
  parts = boxes.cut(box, values_max)
  assert max(map(boxes.size, parts)) <= values_max
  runs = [tensor[boxes.index(x, boxes.whole(tensor.shape))] for x in parts]
  flat = np.concatenate([x.reshape(-1) for x in runs])
  np.testing.assert_array_equal(flat, tensor[1:6, :, 3:37].reshape(-1))
