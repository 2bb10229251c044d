# SPDX-License-Identifier: Apache-2.0
"""Boxes of logical tensors: start and stop along each axis.

Whatever state is passed on, it is said which boxes of which tensor one has and
another needs; how each of them cuts the tensor is its own affair.
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

Box = tuple[tuple[int, int], ...]  # By axis: first index, index after the last.
Held = Iterable[tuple[Box, Any]]  # Boxes of one tensor, with their values.


def size(box: Box) -> int:
  """Returns the number of values in a box."""
  return math.prod(last - first for first, last in box)


def shape(box: Box) -> tuple[int, ...]:
  """Returns the shape of a box."""
  return tuple(last - first for first, last in box)


def whole(shape_: Iterable[int]) -> Box:
  """Returns the box that is all of a tensor."""
  return tuple((0, n) for n in shape_)


def at(index_: tuple[slice, ...], shape_: Iterable[int]) -> Box:
  """Returns the box of an index of slices, as jax gives a shard's."""
  return tuple(s.indices(n)[:2] for s, n in zip(index_, shape_, strict=True))


def text(box: Box) -> str:
  """Returns such as '0:8,16:32'."""
  return ','.join(f'{a}:{b}' for a, b in box)


def common(one: Box, other: Box) -> Box | None:
  """Returns the box that two have in common; None if there is none."""
  box = tuple(
    (max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)
  )
  return None if any(first >= last for first, last in box) else box


def cut(box: Box, values_max: int) -> list[Box]:
  """Returns boxes of at most so many values: one after another, in row-major
  order, their values are the box's.
  """
  if size(box) <= values_max:
    return [box]
  axis = next(i for i, (a, b) in enumerate(box) if b - a > 1)
  first, last = box[axis]
  step = max(1, values_max * (last - first) // size(box))
  parts = []
  for a in range(first, last, step):
    part = (*box[:axis], (a, min(a + step, last)), *box[axis + 1 :])
    parts += cut(part, values_max)
  return parts


def index(box: Box, outer: Box) -> tuple[Any, ...]:
  """Returns the index of a box in the values of one around it."""
  ranges = zip(box, outer, strict=True)
  return (*(slice(a - first, b - first) for (a, b), (first, _) in ranges), ...)


def read(held: Held, box: Box, dtype=np.float32) -> np.ndarray | None:
  """Returns the values of a box; a view, if they are all in one that is held.

  None if some of them are not held.
  """
  values, missing, seen = None, size(box), set()
  for outer, data in held:
    part = common(box, outer)
    if part == box:
      return np.asarray(data)[index(box, outer)]
    if part is None or outer in seen:
      continue
    seen.add(outer)
    if values is None:
      values = np.empty(shape(box), dtype)
    values[index(part, box)] = np.asarray(data)[index(part, outer)]
    missing -= size(part)
  return None if missing else values


def write(held: Held, box: Box, values: np.ndarray):
  """Writes the values of a box to all held boxes that have a part of it."""
  for outer, data in held:
    if (part := common(box, outer)) is not None:
      data[index(part, outer)] = values[index(part, box)]
