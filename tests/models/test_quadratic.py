# SPDX-License-Identifier: Apache-2.0
"""The bowl: its gradient, what its noise depends on, its first loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.config import run_config
from diloco.models import api
from diloco.models.quadratic import make_bowl
from diloco.run.spec import make_model
from experiments import faults

SIZES = (3, 16, 24)
KEY = jax.random.key(0)


def _batch(seed):
  tokens = np.random.default_rng(seed).integers(0, 128, (4, 33))
  return {'tokens': jnp.asarray(tokens, jnp.int32)}


def _gradient(model, params, batch, key=KEY):
  gradient = jax.grad(lambda p: model.loss(p, batch, key)[0])(params)
  return np.asarray(gradient['layers']['kernel'])


def test_it_is_a_model():
  api.check_model(make_bowl(*SIZES))


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


def test_the_bottom_is_at_zero():
  """The mean of n gradients at θ = 0 falls as 1/√n: here to below a third."""
  model = make_bowl(*SIZES)
  bottom = jax.tree.map(jnp.zeros_like, model.init(KEY))
  gradients = np.stack([_gradient(model, bottom, _batch(i)) for i in range(64)])
  one = np.linalg.norm(gradients[0])
  assert np.linalg.norm(gradients.mean(axis=0)) < one / 3


def test_the_first_loss_is_about_one():
  model = make_bowl(*SIZES)
  losses = [
    float(model.loss(model.init(jax.random.key(i)), _batch(i), KEY)[0])
    for i in range(32)
  ]
  assert np.mean(losses) == pytest.approx(1.0, abs=0.1)


def test_a_configuration_chooses_it():
  model = make_model(run_config.build(faults.get_config()))
  (shape,) = api.check_model(model).values()
  assert shape.size == 1 << 20


def test_a_size_of_nothing_is_refused():
  with pytest.raises(ValueError, match='layers=0'):
    make_bowl(0, 16, 24)
