# SPDX-License-Identifier: Apache-2.0
"""Trees of arrays as named arrays on the host, packed into volumes.

If an array is spread over several processes, each has its own shards, under
names that say which, such as 'params/norm@0:8,16:32'.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco.numerics import native

VOLUME_BYTES_MAX = 16 << 20  # Except for an array that is larger.
ALIGNMENT_BYTES = 64  # XLA's alignment for arrays that it uses without a copy.
NAMED_MAX = 3  # Number of differences that an error lists.


# Packs many arrays into few vectors of bytes, each array with its own CRC.
#
# A checkpoint costs about 0.7 ms of CPU per array that Orbax is given, and a
# small model has some hundred arrays. So arrays are concatenated into volumes;
# a large one is a volume by itself, and is not copied for that.


class BrokenRecord(Exception):
  """A file is corrupt, or belongs to another run."""


def pack(
  arrays: Mapping[str, np.ndarray], kept: Sequence[np.ndarray] = ()
) -> tuple[list[np.ndarray], dict[str, dict]]:
  """Concatenates arrays.

  Args:
    arrays: by name, of any dtype that numpy or jax knows; not objects.
    kept: volumes that were packed before and are not needed any more: those of
      the right size are written to again.

  Returns:
    The volumes, uint8 vectors, and the place of each array in them, as JSON.
  """
  parts: list[list[np.ndarray]] = []
  index: dict[str, dict] = {}
  start = VOLUME_BYTES_MAX + 1  # The first array opens the first volume.
  for name, array in arrays.items():
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if start + data.nbytes > VOLUME_BYTES_MAX:
      parts.append([])
      start = 0
    index[name] = {
      'volume': len(parts) - 1,
      'start': start,
      'shape': list(array.shape),
      'dtype': array.dtype.name,
      'crc': native.crc32(data),
    }
    parts[-1].append(data)
    start += data.nbytes
    if padding := -data.nbytes % ALIGNMENT_BYTES:
      parts[-1].append(np.zeros(padding, np.uint8))
      start += padding
  buffers: dict[int, list[np.ndarray]] = {}
  for volume in kept:
    if volume.flags.owndata and volume.flags.writeable:
      buffers.setdefault(volume.nbytes, []).append(volume)
  return [_volume(p, buffers) for p in parts], index


def _volume(
  parts: Sequence[np.ndarray], buffers: Mapping[int, list[np.ndarray]]
) -> np.ndarray:
  if len(parts) == 1:
    return parts[0]
  fit = buffers.get(sum(part.nbytes for part in parts))
  return np.concatenate(parts, out=fit.pop() if fit else None)


def unpack(
  volumes: Sequence[np.ndarray], index: Mapping[str, Mapping]
) -> dict[str, np.ndarray]:
  """Returns the arrays that `pack` was given, as views of the volumes.

  Raises:
    BrokenRecord: a volume is missing or too short, or a CRC does not match.
  """
  arrays = {}
  for name, at in index.items():
    dtype = jnp.dtype(at['dtype'])
    stop = at['start'] + math.prod(at['shape']) * dtype.itemsize
    if at['volume'] >= len(volumes) or stop > volumes[at['volume']].nbytes:
      raise BrokenRecord(f'the bytes of {name} are not there')
    data = volumes[at['volume']][at['start'] : stop]
    actual = native.crc32(data)
    if actual != at['crc']:
      raise BrokenRecord(
        f'{name} has the CRC {actual:08x}, {at["crc"]:08x} was written'
      )
    arrays[name] = data.view(dtype).reshape(at['shape'])
  return arrays


def to_host(tree: Any, views: bool = False) -> dict[str, np.ndarray]:
  """Returns path -> array on the host, unaffected by a donation of the tree.

  jax arrays are copied (all transfers concurrently). numpy arrays are taken as
  they are: they must not be written to any more.

  Args:
    views: jax arrays on CPU devices are not copied; they must not be donated
      while the result is in use.
  """
  leaves = {}
  for name, leaf in _named(tree).items():
    for part, _, x in _parts(name, leaf):
      leaves[part] = x
  for leaf in leaves.values():
    if isinstance(leaf, jax.Array):
      leaf.copy_to_host_async()
  return {name: _on_host(leaf, views) for name, leaf in leaves.items()}


def compare(arrays: Mapping[str, np.ndarray], likes: Any) -> None:
  """Checks that arrays fit in the places of `likes`.

  Args:
    arrays: as named by `to_host`.
    likes: a tree; its leaves have shape and dtype.

  Raises:
    BrokenRecord: names, shapes or dtypes differ from those of `likes`.
  """
  leaves = expected(likes)
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


def expected(likes: Any) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns shape and dtype of what this process has of a tree, by name.

  Args:
    likes: a tree; its leaves have shape and dtype, and may have a sharding.
  """
  return {
    part: jax.ShapeDtypeStruct(_shape(index, like), like.dtype)
    for name, like in _named(likes).items()
    for part, index in _expected(name, like)
  }


def place(arrays: Mapping[str, np.ndarray], likes: Any) -> Any:
  """Returns the tree `likes` with `arrays` in it, checked by `compare`.

  If a leaf of `likes` has a sharding, the array is put there, whatever mesh it
  lay on; otherwise it stays on the host.
  """
  placed = [_placed(name, arrays, like) for name, like in _named(likes).items()]
  return jax.tree.structure(likes).unflatten(placed)


def _placed(name: str, arrays: Mapping[str, np.ndarray], like):
  sharding = getattr(like, 'sharding', None)
  if sharding is None:
    return arrays[name]
  if sharding.is_fully_addressable:
    return jax.device_put(arrays[name], sharding)
  return jax.make_array_from_callback(
    like.shape, sharding, lambda index: arrays[_part_name(name, index, like)]
  )


def _parts(name: str, leaf):
  """Yields (name, index, array) of a leaf's parts in this process."""
  if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
    yield name, None, leaf
    return
  seen = set()
  for shard in leaf.addressable_shards:
    part = _part_name(name, shard.index, leaf)
    if part not in seen:
      seen.add(part)
      yield part, shard.index, shard.data


def _expected(name: str, like):
  """Returns (name, index) of the parts of a leaf that are of this process."""
  sharding = getattr(like, 'sharding', None)
  if sharding is None or sharding.is_fully_addressable:
    return {name: None}.items()
  indices = sharding.addressable_devices_indices_map(like.shape).values()
  return {_part_name(name, index, like): index for index in indices}.items()


def _part_name(name: str, index: tuple[slice, ...], like) -> str:
  ranges = (s.indices(n)[:2] for s, n in zip(index, like.shape))
  return f'{name}@' + ','.join(f'{a}:{b}' for a, b in ranges)


def _shape(index: tuple[slice, ...] | None, like) -> tuple[int, ...]:
  if index is None:
    return tuple(like.shape)
  return tuple(len(range(*s.indices(n))) for s, n in zip(index, like.shape))


def _named(tree: Any) -> dict[str, Any]:
  paths = jax.tree_util.tree_leaves_with_path(tree)
  named = {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf
    for path, leaf in paths
  }
  if len(named) != len(paths):
    raise ValueError('two leaves of the tree have one name')
  return named


def _on_host(leaf, views: bool) -> np.ndarray:
  on_cpu = isinstance(leaf, jax.Array) and any(
    device.platform == 'cpu' for device in leaf.devices()
  )
  if not on_cpu:
    return np.asarray(leaf)
  if len(leaf.devices()) > 1:
    # jax would keep what it puts together for as long as it has the array.
    whole = np.empty(leaf.shape, leaf.dtype)
    for shard in leaf.addressable_shards:
      whole[shard.index] = shard.data
    return whole
  # It may be the very buffer that a donation overwrites.
  array = np.asarray(leaf)
  return array if views else array.copy()


def _kind(leaf) -> str:
  """Returns dtype and shape, such as 'float32[4, 8]'."""
  return 'absent' if leaf is None else f'{leaf.dtype.name}{list(leaf.shape)}'
