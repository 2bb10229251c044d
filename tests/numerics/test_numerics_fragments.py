# SPDX-License-Identifier: Apache-2.0
"""Layouts: every element once, balanced, the same wherever they are built."""

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.numerics import fragments
from diloco.numerics.fragments import TensorSpec, make_layout

MODEL = {
  'embed': TensorSpec((50, 4), 'embedding'),
  'head': TensorSpec((50, 4), 'embedding'),
  'layers/attention/query': TensorSpec((6, 4, 4), 'stacked'),
  'layers/mlp/up': TensorSpec((6, 4, 9), 'stacked'),
  'layers/norm/scale': TensorSpec((6, 4), 'stacked'),
  'layers/temperature': TensorSpec((6,), 'stacked'),
  'norm/scale': TensorSpec((4,)),
  'bias': TensorSpec(()),
}
SCHEMES = [
  (scheme, count, embedding)
  for scheme in fragments.SCHEMES
  for count in (1, 2, 5, 6)
  for embedding in fragments.EMBEDDINGS
  if (count, embedding) != (1, 'own')
]


def filled(specs, xp=np, dtype=np.float32):
  """Every element of the model has a value of its own."""
  params, start = {}, 0
  for path, spec in specs.items():
    size = int(np.prod(spec.shape))
    values = np.arange(start, start + size, dtype=np.float32)
    params[path] = xp.asarray(values.reshape(spec.shape), dtype)
    start += size
  return params, start


@pytest.mark.parametrize(('scheme', 'count', 'embedding'), SCHEMES)
def test_every_element_is_in_exactly_one_fragment(scheme, count, embedding):
  layout = make_layout(MODEL, scheme, count, embedding)
  params, total = filled(MODEL)
  assert len(layout.fragments) == count
  seen = []
  for pieces, size in zip(layout.fragments, layout.sizes):
    taken = fragments.take(params, pieces)
    assert sum(v.size for v in taken.values()) == size > 0
    seen += [v.reshape(-1) for v in taken.values()]
  np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(total))
  names = [p.name for pieces in layout.fragments for p in pieces]
  assert len(set(names)) == len(names)


@pytest.mark.parametrize(('scheme', 'count', 'embedding'), SCHEMES)
def test_order_of_the_specs_is_irrelevant(scheme, count, embedding):
  layout = make_layout(MODEL, scheme, count, embedding)
  items = list(MODEL.items())
  random.Random(0).shuffle(items)
  shuffled = make_layout(dict(items), scheme, count, embedding)
  assert shuffled == layout
  assert shuffled.fingerprint() == layout.fingerprint()


def test_names_and_order():
  layout = make_layout(MODEL, 'layer', 3)
  assert [piece.name for piece in layout.fragments[2]] == [
    'bias',
    'embed[33:50]',
    'head[33:50]',
    'layers/attention/query[4]',
    'layers/attention/query[5]',
    'layers/mlp/up[4]',
    'layers/mlp/up[5]',
    'layers/norm/scale[4]',
    'layers/norm/scale[5]',
    'layers/temperature[4]',
    'layers/temperature[5]',
    'norm/scale',
  ]


def test_balanced_is_flat_on_a_transformer():
  layers, width, vocabulary = 24, 64, 1000
  specs = {
    'embed': TensorSpec((vocabulary, width), 'embedding'),
    'layers/query': TensorSpec((layers, width, width), 'stacked'),
    'layers/key': TensorSpec((layers, width, width // 4), 'stacked'),
    'layers/up': TensorSpec((layers, width, 4 * width), 'stacked'),
    'layers/down': TensorSpec((layers, 4 * width, width), 'stacked'),
    'layers/norm': TensorSpec((layers, width), 'stacked'),
    'norm': TensorSpec((width,)),
  }
  split = make_layout(specs, 'balanced', 24).sizes
  assert max(split) < 1.01 * sum(split) / 24
  own = make_layout(specs, 'balanced', 24, 'own').sizes
  assert own[0] == vocabulary * width
  assert max(own) > max(split)
  # Five tensors a layer: every tenth fragment-to-be has the same two of them.
  tensor = make_layout(specs, 'tensor', 10).sizes
  assert max(tensor) > 1.5 * max(make_layout(specs, 'balanced', 10).sizes)


def test_embedding_split_is_even_and_own_is_alone():
  split = make_layout(MODEL, 'balanced', 6)
  rows = [p.shape[0] for f in split.fragments for p in f if p.path == 'embed']
  assert sum(rows) == 50 and max(rows) - min(rows) <= 1
  own = make_layout(MODEL, 'balanced', 6, 'own')
  assert [p.name for p in own.fragments[0]] == ['embed', 'head']
  assert all(p.role != 'embedding' for f in own.fragments[1:] for p in f)


def test_fingerprint_changes_when_anything_changes():
  changed = [
    make_layout(MODEL, 'balanced', 5),
    make_layout(MODEL, 'balanced', 6),
    make_layout(MODEL, 'balanced', 5, 'own'),
    make_layout(MODEL, 'tensor', 5),
    make_layout(MODEL, 'layer', 5),
    make_layout(MODEL | {'bias': TensorSpec((1,))}, 'balanced', 5),
    make_layout(MODEL | {'norm/scale': TensorSpec((2, 2))}, 'balanced', 5),
    make_layout(MODEL | {'embed': TensorSpec((50, 4))}, 'balanced', 5),
    make_layout(MODEL | {'more': TensorSpec((1,))}, 'balanced', 5),
  ]
  first = changed[0].fragments
  changed.append(fragments.Layout((first[1], first[0], *first[2:])))
  renamed = (dataclasses.replace(first[0][0], path='other'), *first[0][1:])
  changed.append(fragments.Layout((renamed, *first[1:])))
  assert len({layout.fingerprint() for layout in changed}) == len(changed)
  again = make_layout(MODEL, 'balanced', 5).fingerprint()
  assert again == changed[0].fingerprint() and len(again) == 16


@pytest.mark.parametrize(
  ('specs', 'arguments', 'message'),
  [
    (MODEL, ('balanced', 1, 'own'), 'none of fragments=1 to 26 other'),
    ({'a': TensorSpec((9,))}, ('balanced', 1, 'own'), "role 'embedding'"),
    ({'a': TensorSpec((9,))}, ('tensor', 2), '1 logical tensors'),
    ({'a': TensorSpec((9,))}, ('layer', 1), "role 'stacked'"),
    (MODEL, ('layer', 9, 'own'), 'fragments=9 is too many'),
    (MODEL, ('balanced', 99), 'fragments=99 is too many'),
    ({}, ('balanced', 1), '0 logical tensors'),
  ],
)
def test_impossible_layouts_are_named(specs, arguments, message):
  with pytest.raises(ValueError, match=message):
    make_layout(specs, *arguments)


@pytest.mark.parametrize(
  ('shape', 'role'), [((3,), 'norm'), ((3, 0), 'plain'), ((), 'stacked')]
)
def test_impossible_specs_are_named(shape, role):
  with pytest.raises(ValueError, match=r'role=|shape='):
    TensorSpec(shape, role)


@pytest.mark.parametrize('embedding', fragments.EMBEDDINGS)
def test_put_is_the_inverse_of_take_and_pure(embedding):
  layout = make_layout(MODEL, 'balanced', 5, embedding)
  source, _ = filled(MODEL)
  empty = {path: np.zeros(v.shape, v.dtype) for path, v in source.items()}
  result = empty
  for pieces in layout.fragments:
    result = fragments.put(result, pieces, fragments.take(source, pieces))
  for path, value in source.items():
    np.testing.assert_array_equal(result[path], value)
    assert not empty[path].any()


def test_wrong_shapes_do_not_broadcast():
  layout = make_layout(MODEL, 'balanced', 5)
  params, _ = filled(MODEL)
  pieces = [p for p in layout.fragments[0] if p.shape][:1]
  with pytest.raises(ValueError, match='shape'):
    fragments.put(params, pieces, {pieces[0].name: np.zeros((), np.float32)})
  with pytest.raises(ValueError, match='shape'):
    fragments.take({pieces[0].path: np.zeros((100, 3, 2, 2))}, pieces)


@pytest.mark.parametrize('embedding', fragments.EMBEDDINGS)
def test_a_piece_is_changed_out_of_itself(embedding):
  params, _ = filled(MODEL, jnp)
  layout = make_layout(MODEL, 'balanced', 5, embedding)

  @jax.jit
  def changed(params):
    for pieces in layout.fragments:
      for piece in pieces:
        params = fragments.change(params, piece, lambda x: 2 * x + 1)
    return params

  found = changed(params)
  for path, x in params.items():
    np.testing.assert_array_equal(found[path], 2 * x + 1)


def test_changing_layers_copies_nothing():
  """Read and written in turn: else XLA copies the array, as with `put`."""
  specs = {'up': TensorSpec((12, 64, 128), 'stacked')}
  layout = make_layout(specs, 'balanced', 3, 'split')
  like = {'up': jax.ShapeDtypeStruct((12, 64, 128), jnp.float32)}

  def changed(params):
    for piece in layout.fragments[0]:
      params = fragments.change(params, piece, lambda x: 2 * x + 1)
    return params

  compiled = jax.jit(changed, donate_argnums=0).lower(like).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 64 * 128 * 4
