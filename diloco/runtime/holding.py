# SPDX-License-Identifier: Apache-2.0
"""Which slices of each fragment a host of a learner holds."""

from collections.abc import Mapping, Sequence

import numpy as np

from diloco.numerics.fragments import Layout
from diloco.numerics.partition import Box, Partition

Arrays = Mapping[str, np.ndarray]  # Box name -> f32 array of its shape.
Boxes = tuple[Box, ...]


class Holding:
  """The slices of one host; a learner's only process holds whole pieces.

  Args:
    layout: how the run's parameters are cut into fragments.
    partition: how the learner's hosts share the parameters.
    host: index of the host.

  Attributes:
    needed: by fragment, the slices that the host's devices hold.
    by_piece: `needed` by fragment and name of the piece.
    offered: by fragment, the slices that the host offers; together, the hosts
      offer every value once.
  """

  def __init__(self, layout: Layout, partition: Partition, host: int):
    self.host = host
    self.partition = partition
    self.needed: tuple[Boxes, ...] = tuple(
      partition.needed(pieces, host) for pieces in layout.fragments
    )
    self.by_piece = [_grouped(boxes) for boxes in self.needed]
    self.offered: tuple[Boxes, ...] = tuple(
      partition.offered(pieces, host) for pieces in layout.fragments
    )

  def needed_of(self, fragment: int, whole: Arrays) -> dict[str, np.ndarray]:
    """Returns this host's slices of a whole fragment.

    Args:
      whole: piece name -> array.
    """
    return {
      box.name: np.asarray(whole[box.piece.name][box.index], order='C')
      for box in self.needed[fragment]
    }

  def offered_of(self, fragment: int, held: Arrays) -> dict[str, np.ndarray]:
    """Returns the slices that the host offers, as views of what it holds.

    Args:
      held: box name -> array, as from `needed_of`.
    """
    return {
      box.name: held[outer.name][_inside(box, outer)]
      for box in self.offered[fragment]
      for outer in [_around(box, self.by_piece[fragment][box.piece.name])]
    }


def _grouped(boxes: Boxes) -> dict[str, list[Box]]:
  groups: dict[str, list[Box]] = {}
  for box in boxes:
    groups.setdefault(box.piece.name, []).append(box)
  return groups


def _around(box: Box, held: Sequence[Box]) -> Box:
  for outer in held:
    if all(
      first <= a and b <= last
      for (a, b), (first, last) in zip(box.ranges, outer.ranges)
    ):
      return outer
  raise AssertionError(f'{box.name} is offered, and none of {held}')


def _inside(box: Box, outer: Box):
  return (
    *(
      slice(a - first, b - first)
      for (a, b), (first, _) in zip(box.ranges, outer.ranges)
    ),
    ...,
  )
