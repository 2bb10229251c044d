# SPDX-License-Identifier: Apache-2.0
"""DiLoCo as a whole, where it must equal something simpler.

`train` is the method without machines: learners in a loop, fragment p due at
its offset, update applied at once (τ = 0).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.numerics import codec, fragments, inner, merge, outer
from diloco.numerics.fragments import TensorSpec, make_layout

SPECS = {
  'embed': TensorSpec((6, 4), 'embedding'),
  'layers/w': TensorSpec((3, 4, 4), 'stacked'),
  'norm': TensorSpec((4,)),
}
RNG = jax.random.key(0)


@dataclasses.dataclass
class Trained:
  theta: dict  # The syncer's, all fragments, numpy f32.
  learners: list  # Parameters of each learner.


def network(params, batch, rng):
  del rng
  x = batch['x'] @ params['embed']
  x, _ = jax.lax.scan(
    lambda x, w: (x + jnp.tanh(x @ w), None), x, params['layers/w']
  )
  error = jnp.sum(x * params['norm'], axis=-1) - batch['y']
  return jnp.mean(error**2), {}


def quadratic(params, batch, rng):
  """½ Σ (θ - c)²: the gradient is θ - c."""
  del batch, rng
  return sum(0.5 * jnp.sum((p - 3.0) ** 2) for p in params.values()), {}


def linear(params, batch, rng):
  """2 Σ θ: the gradient is 2."""
  del batch, rng
  return sum(2 * jnp.sum(p) for p in params.values()), {}


def normal_params(seed=0):
  rng = np.random.default_rng(seed)
  return {
    k: rng.standard_normal(s.shape, np.float32) / 2 for k, s in SPECS.items()
  }


def integer_params():
  rng = np.random.default_rng(1)
  return {
    k: rng.integers(-8, 8, s.shape).astype(np.float32) for k, s in SPECS.items()
  }


def batches(steps, seed):
  rng = np.random.default_rng(seed)
  return [
    {
      'x': rng.standard_normal((5, 6), np.float32),
      'y': rng.standard_normal(5, np.float32),
    }
    for _ in range(steps)
  ]


def plain_training(params, loss, optimizer, data, lr):
  step = jax.jit(inner.TrainStep(loss, optimizer))
  state = optimizer.init(params)
  for batch in data:
    params, state, _ = step(params, state, batch, lr, RNG)
  return {k: np.asarray(v) for k, v in params.items()}


@dataclasses.dataclass
class Method:
  """The settings that make DiLoCo of plain training."""

  layout: fragments.Layout
  offsets: tuple  # By fragment.
  outer_optimizer: object
  sync_every_steps: int = 4
  codec_name: str = 'f32'
  rule: str = 'rda'


def train(params, loss, optimizer, data, lr, method):
  """M = len(data) learners; fragment p is due where t mod H = offsets[p]."""
  layout = method.layout
  step = jax.jit(inner.TrainStep(loss, optimizer))
  chosen = codec.make_codec(method.codec_name, 8)
  states = [
    outer.init(fragments.take(params, pieces), method.outer_optimizer)
    for pieces in layout.fragments
  ]
  theta = {k: v.copy() for k, v in params.items()}
  learners = [dict(params) for _ in data]
  inner_states = [optimizer.init(params) for _ in data]
  for t in range(1, len(data[0]) + 1):
    for m, stream in enumerate(data):
      learners[m], inner_states[m], _ = step(
        learners[m], inner_states[m], stream[t - 1], lr, RNG
      )
    for p, pieces in enumerate(layout.fragments):
      if t % method.sync_every_steps != method.offsets[p]:
        continue
      contributions = {}
      for m, learner in enumerate(learners):
        local = fragments.take(learner, pieces)
        contributions[m] = {
          k: base - np.asarray(local[k]) for k, base in states[p].theta.items()
        }
      weights = dict.fromkeys(contributions, 1.0)
      delta = merge.merge(contributions, weights, pieces, method.rule, 'mean')
      states[p], _ = outer.step(
        states[p], delta, method.outer_optimizer, chosen, pieces
      )
      theta = fragments.put(theta, pieces, states[p].theta)
      update = {k: jnp.asarray(v) for k, v in states[p].theta.items()}
      learners = [
        fragments.put(jax.tree.map(jnp.asarray, learner), pieces, update)
        for learner in learners
      ]
  return Trained(theta, learners)


def assert_equal(actual, expected, rtol=0.0, atol=0.0):
  for k, v in expected.items():
    np.testing.assert_allclose(actual[k], v, rtol=rtol, atol=atol, err_msg=k)


def test_one_learner_is_plain_training_to_the_bit_on_dyadic_values():
  # θ - c starts as an integer and loses a quarter per step: after 8 steps it
  # has 16 more bits, and f32 holds 24. So every difference is exact.
  data, sgd = batches(8, seed=0), inner.make_inner('sgd')
  expected = plain_training(integer_params(), quadratic, sgd, data, 0.25)
  trained = train(
    integer_params(),
    quadratic,
    sgd,
    [data],
    0.25,
    Method(
      layout=make_layout(SPECS, 'balanced', 2),
      offsets=(0, 2),
      outer_optimizer=outer.make_outer(1.0, 0.0),
      rule='mean',
    ),
  )
  assert_equal(trained.learners[0], expected)


@pytest.mark.parametrize('rule', ['mean', 'rda'])
def test_one_learner_is_plain_training_to_rounding(rule):
  data, adamw = batches(24, seed=2), inner.make_inner(specs=SPECS)
  expected = plain_training(normal_params(), network, adamw, data, 0.01)
  trained = train(
    normal_params(),
    network,
    adamw,
    [data],
    0.01,
    Method(
      layout=make_layout(SPECS, 'balanced', 3),
      offsets=(0, 1, 3),
      outer_optimizer=outer.make_outer(1.0, 0.0),
      rule=rule,
    ),
  )
  assert_equal(trained.learners[0], expected, rtol=1e-4, atol=1e-5)


def test_equal_learners_are_one_learner():
  data, adamw = batches(8, seed=3), inner.make_inner(specs=SPECS)
  method = Method(
    layout=make_layout(SPECS, 'balanced', 2),
    offsets=(0, 2),
    outer_optimizer=outer.make_outer(0.7, 0.9),
    rule='mean',
  )
  one = train(normal_params(), network, adamw, [data], 0.01, method)
  four = train(normal_params(), network, adamw, [data] * 4, 0.01, method)
  assert_equal(four.theta, one.theta)


def test_constant_gradient_has_a_closed_form():
  # SGD with g = 2 and lr = 1/16 moves θ by -H·lr·g = -4/8 in H = 4 steps, for
  # every learner. Δ = 1/2. With η = 1/2, μ = 1/2: b = 1/2, 3/4 and
  # u = -η·(Δ + μ·b) = -3/8, -7/16. Two rounds: -13/16.
  trained = train(
    integer_params(),
    linear,
    inner.make_inner('sgd'),
    [batches(8, seed=4)] * 3,
    1 / 16,
    Method(
      layout=make_layout(SPECS, 'balanced', 1),
      offsets=(0,),
      outer_optimizer=outer.make_outer(0.5, 0.5),
      rule='mean',
    ),
  )
  expected = {k: v - np.float32(13 / 16) for k, v in integer_params().items()}
  assert_equal(trained.theta, expected, rtol=1e-6)


@pytest.mark.parametrize('codec_name', ['f32', 'int4'])
def test_fragments_due_together_are_one_fragment(codec_name):
  # Pieces are encoded and merged alone, so this holds with int4 too, and with
  # RDA as long as no tensor is cut ('own').
  data = [batches(8, seed) for seed in (5, 6)]
  adamw = inner.make_inner(specs=SPECS)
  results = []
  for count, embedding, offsets in ((3, 'own', (0, 0, 0)), (1, 'split', (0,))):
    trained = train(
      normal_params(),
      network,
      adamw,
      data,
      0.01,
      Method(
        layout=make_layout(SPECS, 'balanced', count, embedding),
        offsets=offsets,
        codec_name=codec_name,
        outer_optimizer=outer.make_outer(0.7, 0.9),
      ),
    )
    results.append(trained.theta)
  assert_equal(results[0], results[1])


def test_learners_that_apply_every_update_hold_the_syncers_theta():
  trained = train(
    normal_params(),
    network,
    inner.make_inner(specs=SPECS),
    [batches(8, seed) for seed in (7, 8)],
    0.01,
    Method(
      layout=make_layout(SPECS, 'balanced', 2),
      offsets=(0, 0),
      codec_name='int4',
      outer_optimizer=outer.make_outer(0.7, 0.9),
    ),
  )
  for learner in trained.learners:
    assert_equal(learner, trained.theta)
