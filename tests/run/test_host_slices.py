# SPDX-License-Identifier: Apache-2.0
"""Checks the bytes between hosts of a learner and shards of the syncer."""

import numpy as np
import pytest

from diloco.numerics import payload
from diloco.numerics.codec import make_codec
from diloco.numerics.fragments import TensorSpec, make_layout
from diloco.numerics.mesh_partition import Partition, of_one_host
from diloco.numerics.shard_assignment import shards_of
from diloco.run.payload_parts import SliceMap, boxes_of

SPECS = {
  'embedding': TensorSpec((64, 16), 'embedding'),
  'layers/down': TensorSpec((3, 24, 16), 'stacked'),
  'layers/norm': TensorSpec((3, 16), 'stacked'),
}
LAYOUT = make_layout(SPECS, 'balanced', 2, 'own')  # Fragment 0 is one table.
PARTITION = Partition(
  (('fsdp', 4),),
  (0, 0, 1, 1),
  {
    'embedding': (None, 'fsdp'),
    'layers/down': (None, None, 'fsdp'),
    'layers/norm': (None, None),
  },
)

ONE_HOST = of_one_host({path: spec.shape for path, spec in SPECS.items()})


def _theta(fragment: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(fragment)
  pieces = LAYOUT.fragments[fragment]
  return {p.name: rng.standard_normal(p.shape, np.float32) for p in pieces}


@pytest.fixture(params=[1, 2])
def owners(request):
  return shards_of(LAYOUT, request.param)


@pytest.mark.parametrize('partition', [ONE_HOST, PARTITION])
@pytest.mark.parametrize('fragment', [0, 1])
def test_what_hosts_offer_is_joined_to_the_whole(owners, partition, fragment):
  slice_map, codec = SliceMap(owners, partition), make_codec('f32')
  theta, found = _theta(fragment), {}
  sizes = slice_map.up_bytes(fragment, codec)
  assert sum(sizes) == 4 * LAYOUT.sizes[fragment]  # Every value once.
  for shard in range(owners.shards):
    parts = [
      payload.encode(boxes_of(boxes, theta), boxes, codec)
      for host in range(slice_map.hosts)
      for boxes in [slice_map.offered(fragment, host, shard)]
    ]
    mine = range(shard, len(sizes), owners.shards)
    assert [part.size for part in parts] == [sizes[i] for i in mine]
    found |= slice_map.join(parts, fragment, shard, codec)
  assert found.keys() == theta.keys()
  for name in theta:
    np.testing.assert_array_equal(found[name], theta[name])


@pytest.mark.parametrize('codec', ['int4', 'f32'])
@pytest.mark.parametrize('fragment', [0, 1])
def test_each_host_gets_the_bits_that_all_get(owners, fragment, codec):
  slice_map, codec = SliceMap(owners, PARTITION), make_codec(codec, 8)
  theta = _theta(fragment)
  sizes = slice_map.down_bytes(fragment, codec)
  for shard in range(owners.shards):
    pieces = owners.pieces(fragment, shard)
    data = payload.encode(theta, pieces, codec)
    whole = payload.decode(data, pieces, codec)
    parts = slice_map.cut(data, fragment, shard, codec)
    mine = range(shard, len(sizes), owners.shards)
    assert [part.size for part in parts] == [sizes[i] for i in mine]
    crcs = slice_map.crcs(whole, fragment, shard)
    for host, (part, crc) in enumerate(zip(parts, crcs, strict=True)):
      boxes = slice_map.needed(fragment, host, shard)
      got = payload.decode_cut(part, boxes, codec)
      for name, values in boxes_of(boxes, whole).items():
        np.testing.assert_array_equal(got[name], values)
      assert crc == (payload.crc(got, boxes) if boxes else 0)


def test_a_learner_of_one_host_is_offered_what_all_are():
  owners = shards_of(LAYOUT, 1)
  slice_map, codec = SliceMap(owners, ONE_HOST), make_codec('int4', 8)
  data = payload.encode(_theta(1), LAYOUT.fragments[1], codec)
  [part] = slice_map.cut(data, 1, 0, codec)
  assert part is data  # Not even copied.
  assert slice_map.crcs(_theta(1), 1, 0) == ()
