# SPDX-License-Identifier: Apache-2.0
"""An inner optimizer state on the host, and back, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco.learner import host_parts
from diloco.learner.hosts import host_transfer

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


@pytest.mark.parametrize('chunk_bytes_max', [7, 16, 1 << 26])
def test_chunks_are_full_but_for_the_last(chunk_bytes_max, monkeypatch):
  monkeypatch.setattr(host_transfer, 'CHUNK_BYTES_MAX', chunk_bytes_max)
  arrays = [np.arange(n, dtype=np.int32) for n in (0, 3, 11, 1)]
  chunks = host_transfer._cut(arrays)
  assert [x.size for x in chunks[:-1]] == [chunk_bytes_max] * (len(chunks) - 1)
  expected = np.concatenate(arrays).view(np.uint8)
  np.testing.assert_array_equal(np.concatenate(chunks), expected)
