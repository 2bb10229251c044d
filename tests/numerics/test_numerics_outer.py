# SPDX-License-Identifier: Apache-2.0
"""The outer step: Nesterov, error feedback, and bytes that both sides share."""

import io
import math

import jax
import numpy as np
import optax
import pytest

from diloco.config import sections
from diloco.numerics import codec, outer, payload
from diloco.numerics.fragments import TensorSpec, make_layout
from diloco.numerics.optimizers import OUTER

SPECS = {
  'a': TensorSpec((2, 10, 13), 'stacked'),
  'b': TensorSpec((37,)),
  'c': TensorSpec(()),
}
(PIECES,) = make_layout(SPECS, 'balanced', 1).fragments
F32 = codec.make_codec('f32')


def normal(rng, scale: float = 1.0) -> dict[str, np.ndarray]:
  return {
    p.name: np.asarray(scale * rng.standard_normal(p.shape), np.float32)
    for p in PIECES
  }


def assert_same_bits(actual, expected):
  assert payload.crc(actual, PIECES) == payload.crc(expected, PIECES)


def saved_and_restored(state, optimizer):
  """Through bytes, as a checkpoint: arrays by position, no pickle."""
  file = io.BytesIO()
  leaves = jax.tree.leaves((state.theta, state.optimizer_state, state.residual))
  np.savez(file, *leaves, version=state.version)
  file.seek(0)
  with np.load(file, allow_pickle=False) as data:
    restored = [data[f'arr_{i}'] for i in range(len(leaves))]
    version = int(data['version'])
  template = outer.init(normal(np.random.default_rng(99)), optimizer)
  structure = jax.tree.structure(
    (template.theta, template.optimizer_state, template.residual)
  )
  theta, optimizer_state, residual = jax.tree.unflatten(structure, restored)
  return outer.FragmentState(theta, optimizer_state, residual, version)


@pytest.mark.parametrize('nesterov', [True, False])
@pytest.mark.parametrize('momentum', [0.0, 0.5, 0.9])
def test_sgd_with_momentum_is_its_formula(momentum, nesterov):
  rng = np.random.default_rng(0)
  optimizer = outer.make_outer(0.7, momentum, nesterov)
  state = outer.init(normal(rng), optimizer)
  theta = {name: v.astype(np.float64) for name, v in state.theta.items()}
  b = {name: np.zeros(v.shape) for name, v in theta.items()}
  for _ in range(5):
    delta = normal(rng)
    state, _ = outer.step(state, delta, optimizer, F32, PIECES)
    for name in theta:
      b[name] = momentum * b[name] + delta[name]
      direction = delta[name] + momentum * b[name] if nesterov else b[name]
      theta[name] = theta[name] - 0.7 * direction
  assert state.version == 5
  for name in theta:
    np.testing.assert_allclose(state.theta[name], theta[name], atol=1e-5)


def _fused(a, b, c):
  """a·b + c with one rounding: products of f32 are exact in f64."""
  exact = np.multiply(a, b, dtype=np.float64)
  return (exact + np.asarray(c, np.float64)).astype(np.float32)


@pytest.mark.parametrize('anneal', [None, outer.Anneal(1, 4, 0.8)])
def test_products_and_sums_are_rounded_one_after_the_other(anneal):
  """The bits of every CPU, also of one that fuses them in one instruction."""
  rng = np.random.default_rng(11)
  optimizer = outer.make_outer(0.6, 0.7, True, anneal)
  state = outer.init({n: 0 * v for n, v in normal(rng).items()}, optimizer)
  b = theta = state.theta
  differ = 0
  for n in range(5):
    share = anneal.share(n) if anneal else 0.0
    lr = np.float32(0.6 + share * (0.8 - 0.6))
    momentum = np.float32(0.7 * (1.0 - share))
    delta = normal(rng)
    state, _ = outer.step(state, delta, optimizer, F32, PIECES)
    for name, v in delta.items():
      differ += np.sum(_fused(momentum, b[name], v) != momentum * b[name] + v)
    b = {name: momentum * b[name] + v for name, v in delta.items()}
    moved = {name: -lr * (momentum * b[name] + v) for name, v in delta.items()}
    theta = {name: theta[name] + v for name, v in moved.items()}
    for name, v in theta.items():
      np.testing.assert_array_equal(state.theta[name], v)
  assert differ > 20  # So a fused step would not have passed.


def test_adam_is_optax_s_and_keeps_its_bits_in_numpy():
  rng = np.random.default_rng(13)
  ours, theirs = (
    outer.make_adam(0.3, 0.9, 0.95, 0.1),
    optax.adam(0.3, b1=0.9, b2=0.95, eps=0.1),
  )
  state = outer.init(normal(rng), ours)
  other = outer.init(state.theta, theirs)
  for n in range(1, 30):
    delta = normal(rng)
    before = state
    state, _ = outer.step(state, delta, ours, F32, PIECES)
    other, _ = outer.step(other, delta, theirs, F32, PIECES)
    for name, x in state.theta.items():
      np.testing.assert_allclose(x, other.theta[name], rtol=1e-5, atol=1e-6)
    # Each product, quotient and root is rounded by itself.
    f32, old = np.float32, before.optimizer_state
    m = f32(0.9) * old.mean['b'] + f32(1 - 0.9) * delta['b']
    v = f32(0.95) * old.square['b'] + f32(1 - 0.95) * (delta['b'] * delta['b'])
    m_hat, v_hat = (
      x / f32(1 - math.prod([b] * n)) for x, b in ((m, 0.9), (v, 0.95))
    )
    moved = f32(-0.3) * m_hat / (np.sqrt(v_hat) + f32(0.1))
    np.testing.assert_array_equal(state.theta['b'], before.theta['b'] + moved)
  leaves = jax.tree.leaves((state.theta, state.optimizer_state))
  assert {(type(x), x.dtype.kind) for x in leaves} <= {
    (np.ndarray, 'f'),
    (np.ndarray, 'i'),
  }


class Counted(float):
  """A factor that counts its products."""

  products = 0

  def __rmul__(self, other):
    self.products += 1
    return float(self) * other


def test_a_round_of_adam_goes_on_from_the_power_of_the_one_before():
  b1, b2 = Counted(0.9), Counted(0.9999)
  optimizer = outer.make_adam(0.3, b1, b2, 0.1)
  ones = {'w': np.ones(3, np.float32)}
  state = optimizer.init(ones)

  def moved(rounds):
    at = state._replace(rounds=np.asarray(rounds - 1, np.int32))
    return optimizer.update(ones, at)[0]['w']

  first = moved(1000)
  assert b2.products == 1000 and b1.products < 400  # 0.9³⁹⁹ is nothing to 1.
  moved(1000)  # Of another fragment.
  after = moved(1001)
  assert b2.products == 1001 and b1.products < 400
  powers = [1 - math.prod([b] * 1001) for b in (0.9, 0.9999)]
  mean, square = (
    np.float32(1 - b) / np.float32(unbiased)
    for b, unbiased in zip((0.9, 0.9999), powers, strict=True)
  )
  expected = np.float32(-0.3) * mean / (np.sqrt(square) + np.float32(0.1))
  np.testing.assert_array_equal(after, np.full(3, expected, np.float32))
  np.testing.assert_array_equal(moved(1000), first)  # As after a restart.


def test_an_averaged_piece_takes_its_delta_as_it_is():
  rng = np.random.default_rng(8)
  (pieces,) = make_layout(
    SPECS | {'b': TensorSpec((37,), 'averaged')}, 'balanced', 1
  ).fragments
  optimizer = outer.make_outer(0.25, 0.5)
  state = plain = outer.init(normal(rng), optimizer)
  sum_b = np.zeros(37, np.float32)
  for _ in range(3):
    delta = normal(rng)
    sum_b += delta['b']
    before = state
    state, data = outer.step(state, delta, optimizer, F32, pieces)
    plain, _ = outer.step(plain, delta, optimizer, F32, PIECES)
    rebuilt = outer.rebuild(before.theta, data, F32, pieces)
    np.testing.assert_array_equal(rebuilt['b'], state.theta['b'])
    np.testing.assert_array_equal(plain.theta['c'], state.theta['c'])
  first = outer.init(normal(np.random.default_rng(8)), optimizer).theta['b']
  np.testing.assert_allclose(state.theta['b'], first - sum_b, atol=1e-5)
  assert not np.allclose(plain.theta['b'], state.theta['b'])


@pytest.mark.parametrize('name', codec.CODECS)
def test_syncer_and_learner_agree_to_the_bit_for_50_rounds(name):
  chosen = codec.make_codec(name, 32)
  rng = np.random.default_rng(2)
  optimizer = outer.make_outer(0.7, 0.9)
  state = outer.init(normal(rng), optimizer)
  learner = {k: v.copy() for k, v in state.theta.items()}
  for round_ in range(50):
    delta = normal(rng, scale=10.0 ** rng.uniform(-6, 1))
    state, data = outer.step(state, delta, optimizer, chosen, PIECES)
    learner = outer.rebuild(learner, data, chosen, PIECES)
    assert payload.crc(state.theta, PIECES) == payload.crc(learner, PIECES), (
      f'{round_=}'
    )
  assert all(isinstance(v, np.ndarray) for v in learner.values())


@pytest.mark.parametrize('name', codec.CODECS)
def test_what_is_not_sent_is_the_residual(name):
  chosen = codec.make_codec(name, 32)
  rng = np.random.default_rng(3)
  optimizer = outer.make_outer(0.5, 0.0)
  state = outer.init(normal(rng), optimizer)
  delta = normal(rng)
  after, data = outer.step(state, delta, optimizer, chosen, PIECES)
  sent = payload.decode(data, PIECES, chosen)
  for k, v in delta.items():
    np.testing.assert_array_equal(after.residual[k], -v / 2 - sent[k])
    np.testing.assert_array_equal(after.theta[k], state.theta[k] + sent[k])
    if name == 'f32':
      assert not after.residual[k].any()


def constant_with_one_large_value():
  """Per block one 1 and else 0.05, less than half a step of int4, 0.067."""
  delta = {p.name: np.full(p.shape, 0.05, np.float32) for p in PIECES}
  for v in delta.values():
    v.reshape(-1)[::32] = 1
  return delta


@pytest.mark.parametrize(
  ('name', 'levels'), [('int4', 7), ('int8', 127), ('bf16', 128)]
)
def test_error_feedback_keeps_the_sum_within_one_step(name, levels):
  chosen = codec.make_codec(name, 32)
  optimizer = outer.make_outer(1.0, 0.0)
  zeros = {p.name: np.zeros(p.shape, np.float32) for p in PIECES}
  state, rng = outer.init(zeros, optimizer), np.random.default_rng(4)
  total = {k: np.zeros(v.shape) for k, v in zeros.items()}
  for _ in range(100):
    delta = normal(rng, scale=0.1)
    for k, v in constant_with_one_large_value().items():
      delta[k] += v
      total[k] -= delta[k]
    state, data = outer.step(state, delta, optimizer, chosen, PIECES)
    sent = payload.decode(data, PIECES, chosen)
    largest_step = max(abs(v).max() for v in sent.values()) / levels
    for k, v in total.items():
      assert abs(state.theta[k] - v).max() <= largest_step + 1e-4
      # f32 rounds each of the sums; nothing else is lost.
      assert abs(state.theta[k] + state.residual[k] - v).max() < 1e-4


def test_without_error_feedback_small_updates_are_lost():
  chosen = codec.make_codec('int4', 32)
  optimizer = outer.make_outer(1.0, 0.0)
  zeros = {p.name: np.zeros(p.shape, np.float32) for p in PIECES}
  with_feedback = without = outer.init(zeros, optimizer)
  delta = constant_with_one_large_value()
  for _ in range(100):
    with_feedback, _ = outer.step(
      with_feedback, delta, optimizer, chosen, PIECES
    )
    without, _ = outer.step(
      without, delta, optimizer, chosen, PIECES, error_feedback=False
    )
  assert without.theta['b'][1] == 0  # 100 · -0.05 never arrived.
  assert with_feedback.theta['b'][1] == pytest.approx(-5, abs=0.1)
  assert not any(v.any() for v in without.residual.values())


@pytest.mark.parametrize('kind', OUTER)
@pytest.mark.parametrize('name', ['int4', 'f32'])
def test_restart_equals_uninterrupted_to_the_bit(name, kind):
  chosen = codec.make_codec(name, 32)
  settings = sections.OuterConfig(optimizer=kind, anneal_fraction=0.0)
  optimizer = OUTER[kind].make(settings, None)
  rng = np.random.default_rng(5)
  start = outer.init(normal(rng), optimizer)
  deltas = [normal(rng) for _ in range(20)]
  state = start
  for delta in deltas:
    state, data = outer.step(state, delta, optimizer, chosen, PIECES)
  resumed = start
  for round_, delta in enumerate(deltas):
    if round_ == 10:
      resumed = saved_and_restored(resumed, optimizer)
    resumed, resumed_data = outer.step(
      resumed, delta, optimizer, chosen, PIECES
    )
  np.testing.assert_array_equal(resumed_data, data)
  assert_same_bits(resumed.theta, state.theta)
  assert_same_bits(resumed.residual, state.residual)
  assert resumed.version == state.version == 20


def test_step_changes_nothing_it_was_given():
  optimizer = outer.make_outer(0.7, 0.9)
  rng = np.random.default_rng(6)
  theta, delta = normal(rng), normal(rng)
  state = outer.init(theta, optimizer)
  before = payload.crc(theta, PIECES), payload.crc(delta, PIECES)
  for _ in range(2):  # Twice from the same state: the same result.
    after, _ = outer.step(
      state, delta, optimizer, codec.make_codec('int4'), PIECES
    )
    assert (payload.crc(theta, PIECES), payload.crc(delta, PIECES)) == before
    assert_same_bits(state.theta, theta)
    assert not any(v.any() for v in state.residual.values())
  assert not np.shares_memory(state.theta['b'], theta['b'])
  assert after.version == 1 and state.version == 0


@pytest.mark.parametrize('name', ['int4', 'f32'])
def test_non_finite_update_is_refused(name):
  optimizer = outer.make_outer(0.7, 0.9)
  delta = normal(np.random.default_rng(7))
  state = outer.init(delta, optimizer)
  delta['a[1]'][3, 3] = np.nan
  with pytest.raises(ValueError, match=r'update of a\[1\] is not finite'):
    outer.step(state, delta, optimizer, codec.make_codec(name), PIECES)


def test_the_outer_step_warms_up_from_plain_means():
  """Over four rounds η goes from 1 to 0.6 and μ from 0 to 0.8, exactly."""
  schedule = outer.Anneal(math.inf, 10, 1.0, warmup=4)
  found = [schedule.at(n, 0.6, 0.8) for n in (0, 1, 2, 4, 99)]
  wanted = [(1.0, 0.0), (0.9, 0.2), (0.8, 0.4), (0.6, 0.8), (0.6, 0.8)]
  np.testing.assert_allclose(found, wanted, rtol=1e-15)
  optimizer = outer.make_outer(0.6, 0.8, True, schedule)
  state = outer.init(normal(np.random.default_rng(3)), optimizer)
  delta = normal(np.random.default_rng(4))
  moved, _ = outer.step(state, delta, optimizer, F32, PIECES)
  for name, theta in state.theta.items():
    np.testing.assert_array_equal(moved.theta[name], theta - delta[name])


def test_annealing_ends_with_plain_steps_of_the_final_rate():
  """Constant Δ, η = 0.5, μ = 0.5 over rounds 2 to 4 to η = 1, μ = 0.

  Nesterov: b' = μ·b + Δ, u = η·(Δ + μ·b'). Rounds 1, 2: η = μ = 0.5;
  round 3 (n = 2) is still before the fall; n = 3: η = 0.75, μ = 0.25; then
  η = 1, μ = 0. In units of Δ: b = 1, 1.5, 1.75, 1.4375; u = 0.75, 0.875,
  0.9375, 1.01953125, 1, 1.
  """
  optimizer = outer.make_outer(0.5, 0.5, True, outer.Anneal(2, 4, 1.0))
  state = optimizer.init({'a': np.zeros(1, np.float32)})
  moves = []
  for _ in range(6):
    delta = {'a': np.ones(1, np.float32)}
    update, state = optimizer.update(delta, state)
    moves.append(-float(update['a'][0]))
  assert moves == [0.75, 0.875, 0.9375, 1.01953125, 1.0, 1.0]
