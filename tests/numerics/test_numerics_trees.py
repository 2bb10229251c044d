# SPDX-License-Identifier: Apache-2.0
"""Pytrees are merged and encoded as the arrays in them are, to the bit."""

import jax.numpy as jnp
import numpy as np
import pytest

import diloco
from diloco.numerics import codec as codecs
from diloco.numerics import merge as merges


def _tree(seed: int):
  draw = np.random.default_rng(seed)
  return {
    'table': draw.standard_normal((5, 300), np.float32),
    'inner': [draw.standard_normal(7, np.float32), np.float32(seed)],
  }


@pytest.mark.parametrize('rule', merges.RULES)
def test_leaves_are_merged_as_pieces_are(rule):
  trees, weights = {2: _tree(2), 0: _tree(0)}, {0: 1.0, 2: 3.0}
  merged = diloco.merge(trees, weights, rule)
  wanted = merges.RULES[rule].merge(
    [trees[0]['table'], trees[2]['table']], [1.0, 3.0]
  )
  np.testing.assert_array_equal(merged['table'], wanted)
  assert merged['inner'][1].shape == ()
  assert merged['inner'][1] == 1.5  # Of one value: the mean.


def test_rda_keeps_the_length_of_orthogonal_vectors():
  x, y = jnp.float32([3, 0]), jnp.float32([0, 3])
  np.testing.assert_allclose(np.linalg.norm(diloco.rda([x, y])), 3.0, rtol=1e-6)


def test_what_does_not_belong_together_is_refused():
  x = np.ones(3, np.float32)
  for contributions, weights, said in (
    ([x, np.ones(4, np.float32)], None, r'leaves of shapes \[\(3,\), \(4,\)\]'),
    ([{'a': x}, {'b': x}], None, 'must be one structure'),
    ({0: x, 2: x}, {0: 1.0}, r'contributions of \[0, 2\], weights of \[0\]'),
    ([x], [-1.0], 'must be finite and ≥ 0'),
    ([], None, 'nothing to merge'),
  ):
    with pytest.raises(ValueError, match=said):
      diloco.merge(contributions, weights)
  with pytest.raises(ValueError, match="rule='median': must be one of rda, me"):
    diloco.merge([x], rule='median')


@pytest.mark.parametrize('name', codecs.CODECS)
def test_a_tree_is_encoded_leaf_by_leaf(name):
  codec, inner, tree = (
    diloco.make_codec(name),
    codecs.make_codec(name),
    _tree(1),
  )
  encoded = codec.encode(tree)
  table = tree['table'].reshape(-1)
  np.testing.assert_array_equal(encoded['table'].data, inner.encode(table))
  decoded = codec.decode(encoded)
  np.testing.assert_array_equal(
    decoded['table'].reshape(-1), inner.decode(inner.encode(table), table.size)
  )
  assert decoded['inner'][1].shape == ()
  sent = encoded['table'].data.size + sum(x.data.size for x in encoded['inner'])
  assert codec.nbytes(tree) == sent


def test_an_array_is_a_tree_and_must_be_f32():
  codec = diloco.make_codec('int8')
  x = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
  assert codec.decode(codec.encode(x)).shape == (2, 3)
  with pytest.raises(ValueError, match='float64'):
    codec.encode(np.ones(3))
