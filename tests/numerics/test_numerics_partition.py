# SPDX-License-Identifier: Apache-2.0
"""Parts of hosts: they tile the pieces, and cut bytes decode to the same."""

import random

import numpy as np
import pytest

from diloco.numerics import payload
from diloco.numerics.codec import CODECS, make_codec
from diloco.numerics.fragments import TensorSpec, make_layout
from diloco.numerics.mesh_partition import Partition, Slice, from_text

SPECS = {
  'embedding': TensorSpec((64, 16), 'embedding'),
  'layers/down': TensorSpec((3, 24, 16), 'stacked'),
  'layers/experts': TensorSpec((3, 4, 16, 12), 'stacked'),
  'layers/norm': TensorSpec((3, 16), 'stacked'),
  'scalar': TensorSpec(()),
}
SPLITS = {
  'embedding': ('tensor', 'fsdp'),
  'layers/down': (None, 'tensor', 'fsdp'),
  'layers/experts': (None, 'expert', 'fsdp', 'tensor'),
  'layers/norm': (None, None),
  'scalar': (),
}
SHAPES = {path: spec.shape for path, spec in SPECS.items()}
# (fsdp, expert, tensor), hosts of the devices.
MESHES = [
  ((1, 1, 1), (0,)),
  ((4, 1, 1), (0, 0, 1, 1)),
  ((4, 1, 1), (0, 1, 0, 1)),
  ((1, 1, 4), (0, 0, 1, 1)),
  ((2, 1, 2), (0, 0, 1, 1)),
  ((2, 1, 2), (0, 1, 0, 1)),
  ((2, 2, 2), (0, 0, 1, 1, 2, 2, 3, 3)),
]


def _partition(sizes, hosts) -> Partition:
  return Partition(
    tuple(zip(('fsdp', 'expert', 'tensor'), sizes)), hosts, SPLITS
  )


def _random(pieces, seed):
  rng = np.random.default_rng(seed)
  return {p.name: rng.standard_normal(p.shape, np.float32) for p in pieces}


@pytest.mark.parametrize('fragments', [1, 3])
@pytest.mark.parametrize('sizes, hosts', MESHES)
def test_offered_boxes_of_all_hosts_tile_every_piece_once(
  sizes, hosts, fragments
):
  partition = _partition(sizes, hosts)
  for pieces in make_layout(SPECS, 'balanced', fragments).fragments:
    seen = {piece.name: np.zeros(piece.shape, int) for piece in pieces}
    for host in range(partition.host_count):
      for box in partition.offered(pieces, host):
        seen[box.piece.name][box.index] += 1
    for name, counts in seen.items():
      assert (counts == 1).all(), f'{name}: {counts}'


@pytest.mark.parametrize('sizes, hosts', MESHES)
def test_a_host_needs_what_it_offers(sizes, hosts):
  partition = _partition(sizes, hosts)
  [pieces] = make_layout(SPECS, 'balanced', 1).fragments
  for host in range(partition.host_count):
    needed = {piece.name: np.zeros(piece.shape, int) for piece in pieces}
    for box in partition.needed(pieces, host):
      needed[box.piece.name][box.index] += 1
    assert max(int(counts.max()) for counts in needed.values()) == 1
    for box in partition.offered(pieces, host):
      assert (needed[box.piece.name][box.index] == 1).all()


@pytest.mark.parametrize('name', CODECS)
@pytest.mark.parametrize('sizes, hosts', MESHES)
def test_what_a_host_takes_decodes_to_the_bits_of_the_whole(sizes, hosts, name):
  codec, partition = make_codec(name, 8), _partition(sizes, hosts)
  for pieces in make_layout(SPECS, 'balanced', 3).fragments:
    data = payload.encode(_random(pieces, 7), pieces, codec)
    whole = payload.decode(data, pieces, codec)
    for host in range(partition.host_count):
      boxes = partition.needed(pieces, host)
      taken = payload.cut(data, pieces, boxes, codec)
      assert taken.size == payload.cut_bytes(boxes, codec)
      found = payload.decode_cut(taken, boxes, codec)
      assert list(found) == [box.name for box in boxes]
      for box in boxes:
        np.testing.assert_array_equal(
          found[box.name], whole[box.piece.name][box.index]
        )


@pytest.mark.parametrize('seed', range(10))
def test_any_rectangle_of_any_piece_can_be_cut_out(seed):
  rng = random.Random(seed)
  shape = tuple(rng.randint(1, 9) * rng.choice((1, 4)) for _ in range(3))
  [[piece]] = make_layout({'x': TensorSpec(shape)}, 'balanced', 1).fragments
  ranges = []
  for size in shape:
    first = rng.randrange(size)
    ranges.append((first, rng.randint(first + 1, size)))
  box = Slice(piece, tuple(ranges))
  codec = make_codec(rng.choice(list(CODECS)), rng.choice((8, 16)))
  data = payload.encode(_random([piece], seed), [piece], codec)
  whole = payload.decode(data, [piece], codec)[piece.name]
  found = payload.decode_cut(
    payload.cut(data, [piece], [box], codec), [box], codec
  )
  np.testing.assert_array_equal(found[box.name], whole[box.index])


def test_a_partition_travels_as_text():
  partition = _partition((2, 2, 2), (0, 0, 1, 1, 2, 2, 3, 3))
  assert from_text(partition.to_text(), SHAPES, hosts_max=4) == partition


@pytest.mark.parametrize(
  'text, said',
  [
    ('nonsense', 'Expecting value'),
    ('[]', 'not enough values'),
    ('{"axes": 1}', 'not enough values'),
    ('[[["fsdp", 2]], [0], {}]', '1 devices'),
    ('[[["fsdp", 0]], [], {}]', '0 devices'),
    ('[[["fsdp", 2]], [0, 2], {}]', 'must be 0, 1'),
    ('[[["fsdp", 2]], [0, 1], {}]', 'differs from the run'),
    ('[[["fsdp", 2]], [0, 1], {"x": ["tensor"]}]', 'is split over'),
    ('[[["fsdp", 2]], [0, 1], {"x": ["fsdp"]}]', 'not split evenly'),
    ('[[["fsdp", 2]], [0, 1], {"x": [null, null]}]', 'not split evenly'),
    ('[[["fsdp", 5]], [0, 1, 2, 3, 4], {"x": [null]}]', 'at most 4'),
    ('[' * 100_000, 'recursion'),
  ],
)
def test_a_partition_that_makes_no_sense_is_refused(text, said):
  with pytest.raises(ValueError, match=said):
    from_text(text, {'x': (7,)}, hosts_max=4)
