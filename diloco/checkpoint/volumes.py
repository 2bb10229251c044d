# SPDX-License-Identifier: Apache-2.0
"""Packs many arrays into few vectors of bytes, each array with its own CRC.

A checkpoint costs about 0.7 ms of CPU per array that Orbax is given, and a
small model has some hundred arrays. So arrays are concatenated into volumes; a
large one is a volume by itself, and is not copied for that.
"""

import math
import zlib
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

VOLUME_BYTES_MAX = 16 << 20  # Except for an array that is larger.
ALIGNMENT_BYTES = 64  # XLA's alignment for arrays that it uses without a copy.


class BrokenRecord(Exception):
  """A file is corrupt, or belongs to another run."""


def pack(
  arrays: Mapping[str, np.ndarray],
) -> tuple[list[np.ndarray], dict[str, dict]]:
  """Concatenates arrays.

  Args:
    arrays: by name, of any dtype that numpy or jax knows; not objects.

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
      'crc': zlib.crc32(data),
    }
    parts[-1].append(data)
    start += data.nbytes
    if padding := -data.nbytes % ALIGNMENT_BYTES:
      parts[-1].append(np.zeros(padding, np.uint8))
      start += padding
  return [p[0] if len(p) == 1 else np.concatenate(p) for p in parts], index


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
    found = zlib.crc32(data)
    if found != at['crc']:
      raise BrokenRecord(
        f'{name} has the CRC {found:08x}, {at["crc"]:08x} was written'
      )
    arrays[name] = data.view(dtype).reshape(at['shape'])
  return arrays
