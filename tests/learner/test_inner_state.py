# SPDX-License-Identifier: Apache-2.0
"""An inner optimizer state as bytes, and back, to the bit."""

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
@pytest.mark.parametrize('chunk_bytes_max', [7, 1 << 26])
def test_a_state_comes_back_to_the_bit(optimizer, chunk_bytes_max, monkeypatch):
  """SGD without momentum has an empty state."""
  monkeypatch.setattr(host_transfer, 'CHUNK_BYTES_MAX', chunk_bytes_max)
  state = _state(optimizer)
  chunks = host_transfer.to_chunks(state)
  assert all(0 < chunk.size <= chunk_bytes_max for chunk in chunks)
  found = host_parts.place(host_transfer.from_chunks(chunks, state), state)
  assert jax.tree.structure(found) == jax.tree.structure(state)
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(state)):
    np.testing.assert_array_equal(one, np.asarray(other))


def test_bytes_of_another_state_are_refused():
  chunks = host_transfer.to_chunks(_state(optax.sgd(0.1, momentum=0.9)))
  with pytest.raises(ValueError, match='bytes of inner state, this host'):
    host_transfer.from_chunks(chunks, _state(optax.adamw(0.1)))
