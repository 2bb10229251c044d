# SPDX-License-Identifier: Apache-2.0
"""Computes what one host of a learner holds, sends and receives."""

import dataclasses
import math

import jax
import numpy as np

from diloco.numerics.cutting import cut_bytes
from diloco.numerics.partition import Partition
from diloco.runtime.blueprint import Blueprint

FIRST = 0  # What devices hold alike, the first host sends for all.


@dataclasses.dataclass(frozen=True)
class HostShare:
  """The share of the host that has most, the first.

  Attributes:
    hosts: hosts of the learner.
    values: values of Θ that it holds, N.
    fragment_values: those in the largest fragment, F.
    state_bytes: bytes of the inner state, S.
    up_bytes: bytes sent in a round, on average over fragments.
    down_bytes: bytes received in a round, on average over fragments.
    value_bytes: bytes of a value on the wire, b; the larger direction.
  """

  hosts: int
  values: int
  fragment_values: int
  state_bytes: int
  up_bytes: float
  down_bytes: float
  value_bytes: float


def host_share(
  blueprint: Blueprint, partition: Partition, state_like
) -> HostShare:
  """Returns the share of a learner whose mesh is cut by `partition`.

  Args:
    partition: gives the host of each device.
    state_like: shapes, dtypes and shardings of the inner state.
  """
  needed, up, down = [], [], []
  for pieces in blueprint.layout.fragments:
    boxes = partition.needed(pieces, FIRST)
    needed.append(sum(box.size for box in boxes))
    down.append(cut_bytes(boxes, blueprint.down))
    offered = partition.offered(pieces, FIRST)
    up.append(sum(blueprint.up.nbytes(box.size) for box in offered))
  return HostShare(
    hosts=partition.host_count,
    values=sum(needed),
    fragment_values=max(needed),
    state_bytes=held_bytes(state_like, partition.hosts),
    up_bytes=sum(up) / len(up),
    down_bytes=sum(down) / len(down),
    value_bytes=max(sum(up), sum(down)) / sum(needed),
  )


def held_bytes(like, hosts: tuple[int, ...]) -> int:
  """Bytes of the different shards that the first host's devices hold.

  Args:
    like: a pytree of abstract arrays on one mesh.
    hosts: of each device, in the mesh's row-major order.
  """
  return sum(_held(leaf, hosts) for leaf in jax.tree.leaves(like))


def _held(leaf, hosts: tuple[int, ...]) -> int:
  sharding = leaf.sharding
  indices = sharding.devices_indices_map(leaf.shape)
  mine = {
    tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape))
    for host, device in zip(hosts, sharding.mesh.devices.flat)
    for index in (indices[device],)
    if host == FIRST
  }
  shard = math.prod(sharding.shard_shape(leaf.shape))
  return len(mine) * shard * np.dtype(leaf.dtype).itemsize
