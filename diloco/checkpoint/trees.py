# SPDX-License-Identifier: Apache-2.0
"""Any tree of arrays as named arrays on the host, and back to where it lay."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from diloco.checkpoint.volumes import BrokenRecord

NAMED_MAX = 3  # Of what differs between two trees.


def to_host(tree: Any) -> dict[str, np.ndarray]:
  """Path -> array on the host, which no donation of the tree's can touch.

  Arrays of jax are copied (all transfers side by side). Those of numpy are
  taken as they are: nobody may write to them any more.

  Raises:
    ValueError: an array is spread over several processes.
  """
  leaves = _named(tree)
  for name, leaf in leaves.items():
    if isinstance(leaf, jax.Array):
      if not leaf.is_fully_addressable:
        raise ValueError(
          f'{name} is spread over several processes: only arrays of one '
          f'process can be saved'
        )
      leaf.copy_to_host_async()
  return {name: _host_copy(leaf) for name, leaf in leaves.items()}


def compare(arrays: Mapping[str, np.ndarray], likes: Any) -> None:
  """Refuses arrays that can't take the places of `likes`.

  Args:
    arrays: as `to_host` named them.
    likes: a tree; its leaves have shape and dtype.

  Raises:
    BrokenRecord: names, shapes or dtypes are not those of `likes`.
  """
  leaves = _named(likes)
  differing = [
    f'{name} is {_kind(arrays.get(name))}, expected {_kind(leaves.get(name))}'
    for name in sorted(arrays.keys() | leaves.keys())
    if _kind(arrays.get(name)) != _kind(leaves.get(name))
  ]
  if differing:
    more = len(differing) - NAMED_MAX
    raise BrokenRecord(
      '; '.join(differing[:NAMED_MAX]) + (f'; {more} more' * (more > 0))
    )


def place(arrays: Mapping[str, np.ndarray], likes: Any) -> Any:
  """The tree `likes` with `arrays` in it, which `compare` has let pass.

  Where a leaf of `likes` has a sharding, the array is put there, whatever mesh
  it lay on; else it stays on the host.
  """
  placed = [
    arrays[name]
    if getattr(like, 'sharding', None) is None
    else jax.device_put(arrays[name], like.sharding)
    for name, like in _named(likes).items()
  ]
  return jax.tree.structure(likes).unflatten(placed)


def _named(tree: Any) -> dict[str, Any]:
  paths = jax.tree_util.tree_leaves_with_path(tree)
  named = {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in paths
  }
  assert len(named) == len(paths), 'two leaves of the tree have one name'
  return named


def _host_copy(leaf) -> np.ndarray:
  array = np.asarray(leaf)
  on_cpu = isinstance(leaf, jax.Array) and any(
    device.platform == 'cpu' for device in leaf.devices()
  )
  # There, `array` may be the very buffer that a donation overwrites.
  return array.copy() if on_cpu else array


def _kind(leaf) -> str:
  """Such as 'float32[4, 8]'."""
  return 'absent' if leaf is None else f'{leaf.dtype.name}{list(leaf.shape)}'
