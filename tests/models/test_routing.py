# SPDX-License-Identifier: Apache-2.0
"""Routing: gates, losses by hand, and a bias that evens out the load."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.models import routing
from diloco.models.decoder_config import ExpertsConfig


def _even(top_k=1):
  """Four tokens, four experts, each wanted once by every rank."""
  logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
  return jnp.stack([jnp.roll(logits, i) for i in range(4)])[None], top_k


def test_gates_are_the_softmax_over_the_chosen():
  logits = jnp.array([[[2.0, -1.0, 0.5, 1.0]]])
  routed = routing.route(logits, None, 2)
  np.testing.assert_array_equal(routed.chosen_BLK, [[[0, 3]]])
  expected = jax.nn.softmax(jnp.array([2.0, 1.0]))
  np.testing.assert_allclose(routed.gates_BLK[0, 0], expected, rtol=1e-6)


def test_a_bias_chooses_and_does_not_weigh():
  logits = jnp.array([[[2.0, -1.0, 0.5, 1.0]]])
  routed = routing.route(logits, jnp.array([0.0, 1.0, 0.0, 0.0]), 2)
  np.testing.assert_array_equal(routed.chosen_BLK, [[[1, 0]]])
  expected = jax.nn.softmax(jnp.array([-1.0, 2.0]))
  np.testing.assert_allclose(routed.gates_BLK[0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize('top_k', [1, 2])
def test_even_load_has_its_least_losses(top_k):
  told = routing.balance(routing.route(_even()[0], None, top_k), 0.0)
  assert told['aux'] == pytest.approx(top_k)
  assert told['entropy'] == pytest.approx(1.0)
  assert told['load_max'] == pytest.approx(0.25)
  assert told['z'] == pytest.approx(0.0, abs=1e-12)


def test_one_busy_expert_by_hand():
  # All three tokens want expert 0 of 2, with p = (.8, .2): densities (1, 0),
  # mean(1 · .8, 0 · .2) = .4, times E² = 4: 1.6. Logits (ln 8, ln 2): z =
  # ln² 10. Entropy of (1, 0): 0.
  logits = jnp.broadcast_to(jnp.log(jnp.array([8.0, 2.0])), (1, 3, 2))
  told = routing.balance(routing.route(logits, None, 1), 0.0)
  assert told['aux'] == pytest.approx(1.6)
  assert told['z'] == pytest.approx(np.log(10) ** 2)
  assert told['entropy'] == 0 and told['load_max'] == 1


def test_the_bias_has_the_sign_of_the_load_as_gradient_and_no_value():
  logits = jnp.array([[[3.0, 0.0, 0.0], [3.0, 1.0, 0.0], [0.0, 1.0, 3.0]]])

  def value(bias):
    return routing.balance(routing.route(logits, bias, 1), 0.25)['nudge']

  nudge, gradient = jax.value_and_grad(value)(jnp.zeros(3))
  # Experts 0, 1, 2 have 2, 0 and 1 of 3 tokens; even is 1.
  assert nudge == 0
  np.testing.assert_array_equal(gradient, [0.25, -0.25, 0.0])


def test_the_bias_evens_out_a_skewed_load():
  """Tokens that nearly all want expert 0; only the bias moves."""
  logits = jax.random.normal(jax.random.key(0), (4, 64, 8))
  logits = logits.at[..., 0].add(3.0)

  @jax.jit
  def step(bias):
    def nudge(bias):
      told = routing.balance(routing.route(logits, bias, 2), 0.01)
      return told['nudge'], told['entropy']

    gradient, entropy = jax.grad(nudge, has_aux=True)(bias)
    return bias - gradient, entropy

  bias, entropies = jnp.zeros(8), []
  for _ in range(200):
    bias, entropy = step(bias)
    entropies.append(float(entropy))
  assert entropies[0] < 0.9
  assert entropies[-1] > 0.99
  assert bias[0] < 0


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'experts': 2, 'top_k': 3}, r'top_k=3, must be in 1 … 2'),
    ({'experts': 2, 'top_k': 0}, r'top_k=0'),
    ({'experts': 2, 'top_k': 1, 'aux_weight': -1.0}, 'aux_weight=-1.0'),
    ({'experts': 2, 'top_k': 1, 'bias_rate': np.inf}, 'bias_rate=inf'),
  ],
)
def test_impossible_settings_are_named(arguments, message):
  with pytest.raises(ValueError, match=message):
    ExpertsConfig(**arguments)
