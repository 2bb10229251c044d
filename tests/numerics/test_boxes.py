# SPDX-License-Identifier: Apache-2.0
"""Boxes of one mesh, out of those of another."""

import itertools
import random

import numpy as np
import pytest

from diloco.numerics import boxes
from diloco.numerics.mesh_partition import Partition, passed_on

SHAPE = 12, 24, 12
AXES = 'fsdp', 'expert', 'tensor'


def _drawn(rng: random.Random) -> tuple[Partition, tuple[str | None, ...]]:
  """Returns a partition of one to four hosts, and the splits of a tensor."""
  sizes = [rng.choice((1, 2, 3)) for _ in AXES]
  places = int(np.prod(sizes))
  count = rng.choice([n for n in (1, 2, 3, 4, 6) if places % n == 0])
  hosts = tuple(i * count // places for i in range(places))
  splits = rng.sample((*AXES, None, None, None), len(SHAPE))
  return Partition(tuple(zip(AXES, sizes)), hosts, {'x': tuple(splits)})


@pytest.mark.parametrize('seed', range(60))
def test_each_host_gets_what_it_needs_once(seed):
  rng = random.Random(seed)
  giver, taker = _drawn(rng), _drawn(rng)
  tensor = np.arange(np.prod(SHAPE), dtype=np.int64).reshape(SHAPE)
  splits_of = lambda who: who.splits['x']  # noqa: E731
  for other in range(taker.host_count):
    needed = taker.boxes(SHAPE, splits_of(taker), other)
    held = [(box, np.full(boxes.shape(box), -1)) for box in needed]
    came = 0
    for host in range(giver.host_count):
      mine = [
        (box, tensor[boxes.index(box, boxes.whole(SHAPE))])
        for box in giver.boxes(SHAPE, splits_of(giver), host)
      ]
      for box in passed_on(giver, host, taker, other, SHAPE, splits_of):
        boxes.write(held, box, boxes.read(mine, box))
        came += boxes.size(box)
    assert came == sum(map(boxes.size, needed)), seed
    for box, values in held:
      expected = tensor[boxes.index(box, boxes.whole(SHAPE))]
      np.testing.assert_array_equal(values, expected, str(seed))


def test_what_is_not_all_there_is_not_read():
  tensor = np.arange(24).reshape(4, 6)
  held = [(((0, 4), (0, 3)), tensor[:, :3]), (((2, 4), (3, 6)), tensor[2:, 3:])]
  assert boxes.read(held, ((1, 3), (2, 4)), np.int64) is None
  found = boxes.read(held, ((2, 4), (2, 4)), np.int64)
  np.testing.assert_array_equal(found, tensor[2:, 2:4])


def test_a_box_in_one_that_is_held_is_a_view():
  values = np.zeros((4, 6), np.float32)
  found = boxes.read([(((4, 8), (0, 6)), values)], ((5, 7), (1, 2)))
  assert found.base is values and found.shape == (2, 1)


def test_a_box_held_twice_counts_once():
  half = ((0, 2),), np.zeros(2, np.float32)
  assert boxes.read([half, half], ((0, 4),)) is None
  for one, other in itertools.permutations([half, (((2, 4),), np.ones(2))]):
    found = boxes.read([one, half, other], ((0, 4),))
    np.testing.assert_array_equal(found, [0, 0, 1, 1])
