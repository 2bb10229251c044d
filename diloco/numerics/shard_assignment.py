# SPDX-License-Identifier: Apache-2.0
"""Assigns the pieces of the model to the shards of the syncer.

It is a pure function of the layout and S, so that learners and shards agree
without communication. Whole fragments are assigned, so that a shard that is
away holds up as few of them as possible. A fragment far larger than the others
(embedding 'own') is assigned piece by piece; otherwise all would wait for its
owner.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from diloco.numerics.codec import Codec
from diloco.numerics.fragments import Layout, Pieces

# A fragment larger than a shard's even share by this factor is split.
SPREAD_FACTOR = 1.25


@dataclasses.dataclass(frozen=True)
class ShardAssignment:
  """The owners of all pieces of a layout.

  Attributes:
    layout: the run's layout.
    shards: S.
    of: the owner of each piece, by fragment, in the layout's order.
  """

  layout: Layout
  shards: int
  of: tuple[tuple[int, ...], ...]

  def pieces(self, fragment: int, shard: int) -> Pieces:
    """Returns a shard's pieces of a fragment, in the layout's order."""
    pairs = zip(self.layout.fragments[fragment], self.of[fragment])
    return tuple(piece for piece, owner in pairs if owner == shard)

  def of_fragment(self, fragment: int) -> tuple[int, ...]:
    """Returns the shards that own a piece of the fragment, ascending."""
    return tuple(sorted(set(self.of[fragment])))

  def of_shard(self, shard: int) -> tuple[int, ...]:
    """Returns the fragments of which the shard owns a piece, ascending."""
    return tuple(p for p, owners in enumerate(self.of) if shard in owners)

  def split(
    self, data: np.ndarray, fragment: int, codec: Codec
  ) -> tuple[np.ndarray, ...]:
    """Splits the bytes of an encoded fragment by shard; uint8 [0] if it has
    none.

    Args:
      data: uint8, as `payload.encode` wrote the fragment.
      codec: the codec that wrote it.
    """
    if self.shards == 1:
      return (data,)
    runs: list[list[np.ndarray]] = [[] for _ in range(self.shards)]
    for owner, start, stop in self._runs(fragment, codec):
      runs[owner].append(data[start:stop])
    return tuple(_joined(run) for run in runs)

  def join(
    self, parts: Sequence[np.ndarray], fragment: int, codec: Codec
  ) -> np.ndarray:
    """Joins parts of the sizes that `split` gave; its inverse."""
    if self.shards == 1:
      return parts[0]
    taken = [0] * self.shards
    runs = []
    for owner, start, stop in self._runs(fragment, codec):
      begin = taken[owner]
      taken[owner] = begin + stop - start
      runs.append(parts[owner][begin : taken[owner]])
    return _joined(runs)

  def _runs(self, fragment: int, codec: Codec):
    """Returns (owner, first byte, byte after the last) per run of one owner."""
    runs: list[list[int]] = []
    start = 0
    pieces = self.layout.fragments[fragment]
    for piece, owner in zip(pieces, self.of[fragment]):
      stop = start + codec.nbytes(piece.size)
      if runs and runs[-1][0] == owner:
        runs[-1][2] = stop
      else:
        runs.append([owner, start, stop])
      start = stop
    return runs


def shards_of(layout: Layout, shards: int) -> ShardAssignment:
  """Assigns a layout to S shards, the largest first, each to the lightest.

  Ties go to the lower fragment and the lower shard. A fragment of far more than
  1/S of the model is assigned piece by piece, in the same way; all of them are
  if there are fewer fragments than shards.

  Raises:
    ValueError: S is out of range, or a shard would own nothing.
  """
  if shards < 1:
    raise ValueError(f'shards={shards}, must be at least 1')
  even = SPREAD_FACTOR * sum(layout.sizes) / shards
  lots = []  # (size, fragment, indices of its pieces).
  for p, (pieces, size) in enumerate(zip(layout.fragments, layout.sizes)):
    if size > even or len(layout.fragments) < shards:
      lots += [(piece.size, p, (i,)) for i, piece in enumerate(pieces)]
    else:
      lots.append((size, p, tuple(range(len(pieces)))))
  loads = [0] * shards
  owners = [[0] * len(pieces) for pieces in layout.fragments]
  for size, p, indices in sorted(lots, key=lambda x: (-x[0], x[1], x[2])):
    lightest = loads.index(min(loads))
    loads[lightest] += size
    for i in indices:
      owners[p][i] = lightest
  idle = [s for s, load in enumerate(loads) if not load]
  if idle:
    raise ValueError(
      f'shards={shards} is too many: {len(layout.sizes)} fragments leave '
      f'shards {idle} without any'
    )
  return ShardAssignment(layout, shards, tuple(tuple(each) for each in owners))


def _joined(runs: Sequence[np.ndarray]) -> np.ndarray:
  if len(runs) == 1:
    return runs[0]
  return np.concatenate([np.empty(0, np.uint8), *runs])
