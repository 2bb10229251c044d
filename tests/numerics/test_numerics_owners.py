# SPDX-License-Identifier: Apache-2.0
"""Ownership of fragments: each once, evenly."""

import numpy as np
import pytest

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


@pytest.mark.parametrize('shards', [0, 3])
def test_another_number_of_shards_is_refused(shards):
  with pytest.raises(ValueError, match=rf'shards={shards}: must be in 1 … 2,'):
    shards_of(layout(2), shards)


@pytest.mark.parametrize('shards', [1, 2, 4])
def test_bytes_by_shard_are_those_of_the_owner(shards):
  owners = shards_of(layout(4), shards)
  data = np.arange(5, dtype=np.uint8)
  for p, owner in enumerate(owners.shard_of):
    sizes = [part.size for part in owners.parts(data, p)]
    assert sizes == [5 * (s == owner) for s in range(shards)]
    np.testing.assert_array_equal(owners.parts(data, p)[owner], data)
