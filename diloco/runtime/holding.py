# SPDX-License-Identifier: Apache-2.0
"""Which boxes of each fragment a process of a learner holds, and its bytes."""

from collections.abc import Mapping, Sequence

import numpy as np

from diloco.numerics.fragments import Layout
from diloco.numerics.partition import Box, Partition

Arrays = Mapping[str, np.ndarray]  # Box name -> f32 array of its shape.
Boxes = tuple[Box, ...]


class Holding:
  """The part of one host; a learner of one process holds whole pieces.

  Args:
    layout: of the run.
    partition: of the learner.
    host: which of its processes.

  Attributes:
    needed: by fragment, what the host's devices hold.
    by_piece: the same by fragment and name of the piece.
    offered: by fragment, what it offers of that: together, the hosts offer
      every value once.
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
    """This host's boxes of a whole fragment.

    Args:
      fragment: which.
      whole: piece name -> array.
    """
    return {
      box.name: np.asarray(whole[box.piece.name][box.index], order='C')
      for box in self.needed[fragment]
    }

  def offered_of(self, fragment: int, held: Arrays) -> dict[str, np.ndarray]:
    """What it offers out of what it holds, as views.

    Args:
      fragment: which.
      held: as `needed_of` gives it.
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
