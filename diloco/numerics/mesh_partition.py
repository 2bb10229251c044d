# SPDX-License-Identifier: Apache-2.0
"""The partition of arrays by a learner's mesh, and over its hosts.

Pure arithmetic on names and sizes: a learner describes it once, in its hello,
and from then on both sides know which part of a fragment each host offers and
needs. A host's part consists of *boxes*, rectangles of pieces.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from diloco.numerics import boxes
from diloco.numerics.boxes import Box
from diloco.numerics.fragments import Piece

Splits = tuple[str | None, ...]  # Mesh axis of each axis of an array.


@dataclasses.dataclass(frozen=True)
class Slice:
  """A rectangle of a piece; it may be all of it."""

  piece: Piece
  ranges: Box  # Of the piece.

  @property
  def name(self) -> str:
    """The piece's name if it is all of it, else such as 'norm@0:8,16:32'."""
    if self.is_whole:
      return self.piece.name
    return f'{self.piece.name}@{boxes.text(self.ranges)}'

  @property
  def is_whole(self) -> bool:
    return self.shape == self.piece.shape

  @property
  def shape(self) -> tuple[int, ...]:
    return boxes.shape(self.ranges)

  @property
  def size(self) -> int:
    """Number of values in the box."""
    return math.prod(self.shape)

  @property
  def role(self) -> str:
    return self.piece.role

  @property
  def index(self) -> tuple[Any, ...]:
    """Index for which `array[box.index]` is the box, of the piece's array."""
    return (*(slice(a, b) for a, b in self.ranges), ...)


@dataclasses.dataclass(frozen=True)
class Partition:
  """A mesh, whose devices belong to hosts, and how it cuts arrays.

  Attributes:
    axes: name and size of each axis of the mesh.
    hosts: the host of each device, in the mesh's row-major order.
    splits: path -> the mesh axis that each axis of the parameter is split over,
      None for an axis that is not.
  """

  axes: tuple[tuple[str, int], ...]
  hosts: tuple[int, ...]
  splits: Mapping[str, Splits]

  def __post_init__(self):
    places = math.prod(size for _, size in self.axes)
    if len(self.hosts) != places or min(self.axes, key=_size)[1] < 1:
      raise ValueError(
        f'partition: {len(self.hosts)} devices, the mesh {self.axes} has '
        f'{places}'
      )
    if sorted(set(self.hosts)) != list(range(max(self.hosts) + 1)):
      raise ValueError(
        f'partition: hosts {sorted(set(self.hosts))}, must be 0, 1, …'
      )
    names = {name for name, _ in self.axes}
    for path, splits in self.splits.items():
      used = [name for name in splits if name is not None]
      if not names.issuperset(used) or len(set(used)) != len(used):
        raise ValueError(
          f'partition: {path} is split over {used}, the mesh has {self.axes}'
        )

  @property
  def host_count(self) -> int:
    return max(self.hosts) + 1

  def piece_splits(self, piece: Piece) -> Splits:
    """Returns the mesh axes that split a piece: its parameter's, if possible.

    The number of rows that were cut out of a table may not be divisible. They
    are not split then: a fragment has only a P-th of them.
    """
    splits = self.splits[piece.path]
    sizes = dict(self.axes)
    if piece.layer is not None:
      return splits[1:]
    return tuple(
      name if name is not None and size % sizes[name] == 0 else None
      for name, size in zip(splits, piece.shape, strict=True)
    )

  def needed(self, pieces: Sequence[Piece], host: int) -> tuple[Slice, ...]:
    """Returns the boxes of the pieces on a host's devices, in order."""
    return self._slices(pieces, host, first=False)

  def offered(self, pieces: Sequence[Piece], host: int) -> tuple[Slice, ...]:
    """Returns the boxes that a host offers.

    Each value is offered only by the first device that holds it.
    """
    return self._slices(pieces, host, first=True)

  def boxes(
    self, shape: Sequence[int], splits: Splits, host: int, first: bool = False
  ) -> tuple[Box, ...]:
    """Returns a host's boxes of a tensor.

    Args:
      splits: of that tensor.
      first: without those that a device before the host's holds, too.
    """
    seen, mine = set(), set()
    for owner, box in self._held(shape, splits):
      if owner == host and not (first and box in seen):
        mine.add(box)
      seen.add(box)
    return tuple(_joined(len(shape), list(mine)))

  def to_text(self) -> str:
    """Returns the partition as text, for the hello."""
    return json.dumps(
      [self.axes, self.hosts, dict(self.splits)], separators=(',', ':')
    )

  def _slices(
    self, pieces: Sequence[Piece], host: int, first: bool
  ) -> tuple[Slice, ...]:
    return tuple(
      Slice(piece, box)
      for piece in pieces
      for box in self.boxes(piece.shape, self.piece_splits(piece), host, first)
    )

  def _held(
    self, shape: Sequence[int], splits: Splits
  ) -> Iterable[tuple[int, Box]]:
    """Yields (host, box) of every device."""
    sizes = [size for _, size in self.axes]
    names = [name for name, _ in self.axes]
    for place, host in enumerate(self.hosts):
      at = np.unravel_index(place, sizes)
      ranges = []
      for name, size in zip(splits, shape, strict=True):
        if name is None:
          ranges.append((0, size))
          continue
        axis = names.index(name)
        part = size // sizes[axis]
        ranges.append((int(at[axis]) * part, (int(at[axis]) + 1) * part))
      yield host, tuple(ranges)


def of_one_host(shapes: Mapping[str, tuple[int, ...]]) -> Partition:
  """Returns the partition of a learner whose only host has all of it."""
  splits = {path: (None,) * len(shape) for path, shape in shapes.items()}
  return Partition((('fsdp', 1),), (0,), splits)


def passed_on(
  giver: Partition,
  host: int,
  taker: Partition,
  other: int,
  shape: Sequence[int],
  splits_of: Callable[[Partition], Splits],
) -> tuple[Box, ...]:
  """Returns the boxes of a tensor that one learner's host gives to another's.

  From all hosts of the giver each host of the taker gets what it needs, once.

  Args:
    host: of the giver.
    other: host of the taker.
    splits_of: returns the splits of the tensor in a partition.
  """
  offered = giver.boxes(shape, splits_of(giver), host, first=True)
  needed = taker.boxes(shape, splits_of(taker), other)
  pairs = (boxes.common(a, b) for a in offered for b in needed)
  return tuple(box for box in pairs if box is not None)


def from_text(
  text: str, shapes: Mapping[str, tuple[int, ...]], hosts_max: int
) -> Partition:
  """Parses the text of `to_text` from a peer that is not trusted.

  Args:
    text: the text that was received.
    shapes: path -> shape of every parameter of the run.
    hosts_max: the most hosts a learner may have.

  Raises:
    ValueError: it is not a partition, or does not cut these parameters evenly.
  """
  try:
    axes, hosts, splits = json.loads(text)
    partition = Partition(
      tuple((str(name), int(size)) for name, size in axes),
      tuple(int(host) for host in hosts),
      {str(path): tuple(names) for path, names in splits.items()},
    )
  except (TypeError, AttributeError, RecursionError) as error:
    raise ValueError(f'partition: {error}') from error
  if partition.host_count > hosts_max:
    raise ValueError(
      f'partition: {partition.host_count} hosts, at most {hosts_max}'
    )
  if partition.splits.keys() != shapes.keys():
    differ = sorted(partition.splits.keys() ^ shapes.keys())
    raise ValueError(f'partition: it differs from the run in {differ[:3]}')
  sizes = dict(partition.axes)
  for path, names in partition.splits.items():
    if len(names) != len(shapes[path]) or any(
      name is not None and size % sizes[name]
      for name, size in zip(names, shapes[path])
    ):
      raise ValueError(
        f'partition: {path} of shape {shapes[path]} is not split evenly over '
        f'{names} of {partition.axes}'
      )
  return partition


def _size(axis: tuple[str, int]) -> int:
  return axis[1]


def _joined(axes: int, found: list[Box]) -> list[Box]:
  """Joins neighbouring rectangles: fewer boxes, and longer runs."""
  for axis in range(axes):
    groups: dict = {}
    for ranges in sorted(found):
      others = ranges[:axis] + ranges[axis + 1 :]
      groups.setdefault(others, []).append(ranges)
    found = list(
      itertools.chain.from_iterable(
        _runs(axis, sorted(group, key=lambda r: r[axis]))
        for group in groups.values()
      )
    )
  return sorted(found)


def _runs(axis: int, group: list[Box]):
  """Joins rectangles that differ along `axis` only and touch each other."""
  run = group[0]
  for ranges in group[1:]:
    if ranges[axis][0] == run[axis][1]:
      joined = (run[axis][0], ranges[axis][1])
      run = (*run[:axis], joined, *run[axis + 1 :])
    else:
      yield run
      run = ranges
  yield run
