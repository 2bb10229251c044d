# SPDX-License-Identifier: Apache-2.0
"""Assigns the fragments of the model to the shards of the syncer.

It is a pure function of the layout and S, so that learners and shards agree
without communication. A fragment has one owner, so that a shard that is away
holds up as few of them as possible.
"""

import dataclasses

import numpy as np

from diloco.numerics.fragments import Layout, Pieces


@dataclasses.dataclass(frozen=True)
class ShardAssignment:
  """The owners of all fragments of a layout.

  Attributes:
    layout: the run's layout.
    shards: S.
    shard_of: the shard that owns each fragment.
  """

  layout: Layout
  shards: int
  shard_of: tuple[int, ...]

  def pieces(self, fragment: int, shard: int) -> Pieces:
    """Returns a shard's pieces of a fragment: all of them, or none."""
    owns = shard == self.shard_of[fragment]
    return self.layout.fragments[fragment] if owns else ()

  def of_shard(self, shard: int) -> tuple[int, ...]:
    """Returns the fragments that the shard owns, ascending."""
    return tuple(p for p, owner in enumerate(self.shard_of) if owner == shard)

  def parts(self, data: np.ndarray, fragment: int) -> tuple[np.ndarray, ...]:
    """Returns an encoded fragment's bytes by shard; uint8 [0] for the others'.

    Args:
      data: uint8, as `payload.encode` wrote the fragment.
    """
    owner, nothing = self.shard_of[fragment], np.empty(0, np.uint8)
    return tuple(data if s == owner else nothing for s in range(self.shards))


def shards_of(layout: Layout, shards: int) -> ShardAssignment:
  """Assigns a layout to S shards, the largest first, each to the lightest.

  Ties go to the lower fragment and the lower shard.

  Raises:
    ValueError: S is out of range, or a shard would own nothing.
  """
  if not 1 <= shards <= len(layout.sizes):
    raise ValueError(
      f'shards={shards}: must be in 1 … {len(layout.sizes)}, the fragments'
    )
  loads, owners, sizes = [0] * shards, [0] * len(layout.sizes), layout.sizes
  for p in sorted(range(len(sizes)), key=lambda p: (-sizes[p], p)):
    owners[p] = loads.index(min(loads))
    loads[owners[p]] += sizes[p]
  return ShardAssignment(layout, shards, tuple(owners))
