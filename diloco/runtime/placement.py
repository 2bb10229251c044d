# SPDX-License-Identifier: Apache-2.0
"""Where pieces of fragments lie on a learner's mesh: where their array lies.

Nothing of the exchange is whole on one device: a piece is spread as its
parameter is, so a copy of a fragment leaves each device as that device's own
shards, and comes back as them.
"""

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from diloco.numerics.fragments import Piece


def piece_sharding(piece: Piece, array: NamedSharding) -> NamedSharding:
  """How a piece is spread, given how its whole parameter is.

  The axis along which pieces are cut out (layers, rows of a table) is not
  split again: what is left of it need not be divisible. A fragment has a P-th
  of a table's rows, less than the devices of 'tensor' would have left of it.

  Args:
    piece: of the layout.
    array: of the parameter `piece.path`.
  """
  if piece.layer is not None:
    return NamedSharding(array.mesh, PartitionSpec(*array.spec[1:]))
  if piece.rows is not None:
    return NamedSharding(array.mesh, PartitionSpec(None, *array.spec[1:]))
  return array


def place(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
  """`x` on this process's devices of `sharding`, which may have others too.

  Every process of the mesh calls it with the same `x`; they don't meet.
  """
  return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])
