# SPDX-License-Identifier: Apache-2.0
"""Ownership of pieces: everything once, evenly, and the bytes of a part."""

import numpy as np
import pytest

from diloco.numerics import codec, payload
from diloco.numerics.fragments import TensorSpec, make_layout
from diloco.numerics.shard_assignment import shards_of

SPECS = {
  'embed': TensorSpec((64, 16), 'embedding'),
  'layers/up': TensorSpec((6, 16, 8), 'stacked'),
  'layers/norm': TensorSpec((6, 16), 'stacked'),
  'head': TensorSpec((16, 64)),
}


def layout(fragments=4, embedding='split'):
  return make_layout(SPECS, 'balanced', fragments, embedding)


@pytest.mark.parametrize('embedding', ['split', 'own'])
@pytest.mark.parametrize('shards', [1, 2, 3, 4])
def test_every_piece_has_one_owner_and_every_shard_a_share(shards, embedding):
  owners = shards_of(layout(4, embedding), shards)
  for p, pieces in enumerate(owners.layout.fragments):
    of_shards = [owners.pieces(p, s) for s in range(shards)]
    assert sorted(x.name for x in sum(of_shards, ())) == sorted(
      x.name for x in pieces
    )
  assert all(owners.of_shard(s) for s in range(shards))


def test_a_far_larger_fragment_is_dealt_by_tensor():
  owners = shards_of(layout(3, 'own'), 3)
  sizes = owners.layout.sizes
  spread = [p for p in range(3) if len(owners.of_fragment(p)) > 1]
  assert spread == [p for p in range(3) if sizes[p] > 1.25 * sum(sizes) / 3]


def test_fewer_fragments_than_shards_are_dealt_by_tensor():
  assert shards_of(layout(1), 2).of_fragment(0) == (0, 1)


def test_more_shards_than_tensors_are_refused():
  with pytest.raises(ValueError, match=r'shards=40 is too many: 2 fragments'):
    shards_of(layout(2), 40)


@pytest.mark.parametrize('name', ['int4', 'f32'])
@pytest.mark.parametrize('shards', [1, 2, 4])
def test_parts_are_what_a_shard_would_encode_and_join_again(shards, name):
  owners = shards_of(layout(1), shards)
  chosen = codec.make_codec(name)
  pieces = owners.layout.fragments[0]
  rng = np.random.default_rng(0)
  arrays = {x.name: rng.standard_normal(x.shape, np.float32) for x in pieces}
  data = payload.encode(arrays, pieces, chosen)
  parts = owners.split(data, 0, chosen)
  assert len(parts) == shards
  for shard, part in enumerate(parts):
    own = payload.encode(arrays, owners.pieces(0, shard), chosen)
    np.testing.assert_array_equal(part, own)
  np.testing.assert_array_equal(owners.join(parts, 0, chosen), data)
