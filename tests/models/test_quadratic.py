# SPDX-License-Identifier: Apache-2.0
"""The bowl: its gradient, what its noise depends on, its first loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.models.quadratic import make_bowl

SIZES = (3, 16, 24)
KEY = jax.random.key(0)


def _batch(seed):
  tokens = np.random.default_rng(seed).integers(0, 128, (4, 33))
  return {'tokens': jnp.asarray(tokens, jnp.int32)}


def _gradient(model, params, batch, key=KEY):
  gradient = jax.grad(lambda p: model.loss(p, batch, key)[0])(params)
  return np.asarray(gradient['layers']['kernel'])


def test_the_loss_is_half_the_squared_gradient():
  model = make_bowl(*SIZES)
  params = model.init(KEY)
  gradient = _gradient(model, params, _batch(0))
  loss = model.loss(params, _batch(0), KEY)[0]
  assert float(loss) == pytest.approx(0.5 * np.sum(gradient**2), rel=1e-5)


def test_the_noise_is_of_the_batch_alone():
  model = make_bowl(*SIZES)
  params = model.init(KEY)
  first = _gradient(model, params, _batch(0))
  again = _gradient(model, params, _batch(0), jax.random.key(7))
  np.testing.assert_array_equal(first, again)
  assert not np.allclose(first, _gradient(model, params, _batch(1)))
  turned = {'tokens': _batch(0)['tokens'][::-1]}
  assert not np.allclose(first, _gradient(model, params, turned))
