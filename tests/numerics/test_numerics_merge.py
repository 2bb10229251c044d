# SPDX-License-Identifier: Apache-2.0
"""Merge rules against their formulas in plain Python, and their limits."""

import itertools
import math

import numpy as np
import pytest

from diloco.numerics import merge
from diloco.numerics.fragments import TensorSpec, make_layout

SPECS = {
  'embed': TensorSpec((6, 4), 'embedding'),
  'layers/up': TensorSpec((2, 4, 8), 'stacked'),
  'norm': TensorSpec((4,)),
}
(PIECES,) = make_layout(SPECS, 'balanced', 1).fragments


def vectors(count: int, n: int = 40, seed: int = 0) -> list[np.ndarray]:
  return list(
    np.random.default_rng(seed).standard_normal((count, n), np.float32)
  )


def contributions(count: int, seed: int = 0) -> dict[int, dict]:
  rng = np.random.default_rng(seed)
  return {
    m: {p.name: rng.standard_normal(p.shape, np.float32) for p in PIECES}
    for m in range(count)
  }


def reference_mean(vs, weights):
  total = sum(weights)
  return [
    sum(w * float(v[i]) for w, v in zip(weights, vs)) / total
    for i in range(len(vs[0]))
  ]


def reference_rda(vs, weights):
  norms = [math.sqrt(sum(float(x) ** 2 for x in v)) for v in vs]
  units = [[float(x) / n if n else 0 for x in v] for v, n in zip(vs, norms)]
  direction = reference_mean(units, weights)
  length = math.sqrt(sum(x * x for x in direction))
  radius = sum(w * n for w, n in zip(weights, norms)) / sum(weights)
  return [radius * x / length for x in direction]


@pytest.mark.parametrize('count', [1, 2, 5])
def test_rules_are_their_formulas(count):
  vs, weights = vectors(count), [2.0**m + 0.5 for m in range(count)]
  np.testing.assert_allclose(
    merge.weighted_mean(vs, weights), reference_mean(vs, weights), atol=1e-6
  )
  np.testing.assert_allclose(
    merge.rda(vs, weights), reference_rda(vs, weights), rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize('shape', [(), (1,), (1, 1)])
def test_of_one_element_rda_is_the_mean(shape):
  """The direction of one element is a sign: two small would outvote one."""
  vs = [np.full(shape, x, np.float32) for x in (-8.0, 1.0, 1.0)]
  merged = merge.rda(vs, [1, 1, 2])
  assert merged.shape == shape
  np.testing.assert_array_equal(merged, merge.weighted_mean(vs, [1, 1, 2]))
  assert merged == np.float32(-1.25)


def test_one_learner_is_its_own_merge():
  for w in (1e-3, 1.0, 3.7, 1e12):
    (v,) = vectors(1)
    np.testing.assert_array_equal(merge.weighted_mean([v], [w]), v)
    np.testing.assert_allclose(merge.rda([v], [w]), v, rtol=1e-6)


@pytest.mark.parametrize('rule', [merge.weighted_mean, merge.rda])
def test_zero_weight_is_absence_whatever_the_values(rule):
  vs = vectors(2)
  absent = np.full_like(vs[0], np.nan)
  np.testing.assert_array_equal(
    rule([vs[0], absent, vs[1]], [1, 0, 3]), rule(vs, [1, 3])
  )


@pytest.mark.parametrize(
  'weights', [[0.0, 0.0], [1, -1], [math.nan, 1], [math.inf, 1]]
)
@pytest.mark.parametrize('rule', [merge.weighted_mean, merge.rda])
def test_impossible_weights_are_refused(rule, weights):
  with pytest.raises(ValueError, match='weights'):
    rule(vectors(2), weights)


def test_rda_without_a_direction_is_the_weighted_mean():
  (v,) = vectors(1)
  zero = np.zeros_like(v)
  tiny = np.full_like(v, 1e-42)
  for vs in (
    [zero, zero],
    [v, -v],
    [v, -2 * v],
    [0.1 * v, -0.3 * v],
    [tiny, tiny],
  ):
    np.testing.assert_array_equal(
      merge.rda(vs, [1, 1]), merge.weighted_mean(vs, [1, 1])
    )
  # A zero vector among others has no say in the direction, but in the length.
  np.testing.assert_allclose(merge.rda([v, zero], [1, 1]), v / 2, rtol=1e-6)


@pytest.mark.parametrize('scale', [1e-30, 1e-18, 1e18, 1e37])
def test_rda_neither_overflows_nor_underflows(scale):
  vs = vectors(3)
  scaled = merge.rda([np.float32(scale) * v for v in vs], [1, 2, 3])
  np.testing.assert_allclose(
    scaled / np.float32(scale), merge.rda(vs, [1, 2, 3]), rtol=1e-4, atol=1e-6
  )


def test_arrival_order_changes_no_bit():
  given = contributions(4)
  weights = {0: 1.3, 1: 0.7, 2: 2.1, 3: 0.01}
  expected = merge.merge(given, weights, PIECES)
  for order in itertools.permutations(range(4)):
    actual = merge.merge(
      {m: given[m] for m in order}, {m: weights[m] for m in order}, PIECES
    )
    for name, v in expected.items():
      np.testing.assert_array_equal(actual[name], v)


def test_embedding_is_averaged_and_the_rest_is_rda_per_logical_tensor():
  given, weights = contributions(3), {0: 1.0, 1: 2.0, 2: 3.0}
  merged = merge.merge(given, weights, PIECES)
  assert list(merged) == [p.name for p in PIECES]
  for p in PIECES:
    vs = [given[m][p.name].reshape(-1) for m in range(3)]
    reference = reference_mean if p.role == 'embedding' else reference_rda
    expected = np.reshape(reference(vs, [1, 2, 3]), p.shape)
    np.testing.assert_allclose(merged[p.name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('rule', ['mean', 'rda'])
def test_an_averaged_piece_is_the_mean_whatever_the_rules(rule):
  specs = {'b': TensorSpec((9,), 'averaged')}
  (pieces,) = make_layout(specs, 'tensor', 1).fragments
  vs = vectors(3, n=9)
  merged = merge.merge(
    {m: {'b': v} for m, v in enumerate(vs)},
    {0: 1.0, 1: 2.0, 2: 3.0},
    pieces,
    rule=rule,
    embedding_rule=rule,
  )
  np.testing.assert_allclose(
    merged['b'], reference_mean(vs, [1, 2, 3]), atol=1e-6
  )


def test_fragments_due_together_are_one_fragment():
  # Elementwise (mean) even where rows are cut; RDA only by whole tensors.
  given, weights = {}, {0: 1.0, 1: 2.5}
  rng = np.random.default_rng(1)
  rows = {m: rng.standard_normal((6, 4), np.float32) for m in weights}
  whole = make_layout({'e': TensorSpec((6, 4), 'embedding')}, 'balanced', 1)
  cut = make_layout({'e': TensorSpec((6, 4), 'embedding')}, 'balanced', 3)
  given = {m: {'e': rows[m]} for m in weights}
  expected = merge.merge(given, weights, whole.fragments[0])['e']
  for pieces in cut.fragments:
    part = {m: {p.name: rows[m][p.index] for p in pieces} for m in weights}
    merged = merge.merge(part, weights, pieces)
    for p in pieces:
      np.testing.assert_array_equal(merged[p.name], expected[p.index])


def test_wrong_arguments_are_named():
  given = contributions(2)
  with pytest.raises(ValueError, match=r'of \[0, 1\], weights of \[0, 2\]'):
    merge.merge(given, {0: 1, 2: 1}, PIECES)
  with pytest.raises(ValueError, match='must be > 0'):
    merge.merge({}, {}, PIECES)
