# SPDX-License-Identifier: Apache-2.0
"""A learner's state, small enough to be saved by every test."""

import jax
import numpy as np
import pytest

from diloco.numerics import inner


@pytest.fixture(scope='module')
def learner():
  """Parameters and an AdamW state with something in it, and bases."""
  rng = np.random.default_rng(5)
  params = {
    name: jax.numpy.asarray(rng.normal(size=shape), jax.numpy.float32)
    for name, shape in {'block/w': (4, 6), 'norm': (6,)}.items()
  }
  optimizer = inner.adamw()
  _, state = jax.jit(optimizer.update)(params, optimizer.init(params), params)
  bases = {
    0: {'block/w[0]': rng.normal(size=(6,)).astype(np.float32)},
    1: {'norm': np.asarray(params['norm'])},
  }
  return params, state, bases
