# SPDX-License-Identifier: Apache-2.0
"""Calls `blocks.c`: the numpy code of the syncer's hot path in one pass each.

The numpy code stays the reference, and is what runs where nothing was compiled
(`setup.py` compiles when it installs, if there is a compiler); the bits are the
same. A function here returns None or False where it declines: numpy then does
the same work, or finds what is wrong with it.
"""

import ctypes
import functools
import importlib.util
import logging
import math
import pathlib
import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
  from diloco.numerics.codec import BlockCodec

MODULE = 'diloco.numerics._blocks'
SOURCE = pathlib.Path(__file__).with_name('blocks.c')
SUM_VALUES = 1 << 16  # As in `blocks.c`; of one sum of squares.
TILE_VALUES = 512  # As there; blocks of a codec must divide it to be summed.
_CRC_BYTES, _CRC_BYTES_MIN = 16, 64
_BITS = (4, 8)  # Of one value; numpy has all others.
_INFINITE = 0x7F80_0000

# Of a file of 64 bits: offsets of the tables of segments and sections, then the
# size and number of entries of each; of a segment, its begin and length.
_ELF = struct.Struct('<32x QQ 6x HH HH 2x')
_SEGMENT = struct.Struct('<8x Q 16x Q')

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
_FLOAT = ctypes.c_float
_CODEC = (_LONG, _LONG, _INT, _INT)  # Values, block, bits, bytes of a scale.
_ARGUMENTS = {
  'diloco_encode': (_POINTER, *_CODEC, _POINTER),
  'diloco_decode': (_POINTER, *_CODEC, _POINTER),
  'diloco_sgd_send': (_POINTER, _FLOAT, _FLOAT, _INT, *_CODEC, _POINTER),
  'diloco_inspect': (_POINTER, *_CODEC, _POINTER, _POINTER),
  'diloco_weighted_sum_encoded': (
    *(_POINTER, _POINTER, _LONG),
    *(*_CODEC, _POINTER, _POINTER),
  ),
  'diloco_crc32': (_POINTER, _LONG, _POINTER),
}


@functools.cache
def load() -> ctypes.CDLL | None:
  """Loads the compiled code; None without it, as one line of the log says."""
  log = logging.getLogger(__name__)
  spec = importlib.util.find_spec(MODULE)
  if spec is None or spec.origin is None:
    log.info('codecs and merge run in numpy: blocks.c was not compiled')
    return None
  try:
    library = open_library(spec.origin)
  except (OSError, ValueError) as error:
    log.warning('codecs and merge run in numpy: %s; install anew', error)
    return None
  log.info('codecs and merge run in %s', spec.origin)
  return library


def open_library(path: str) -> ctypes.CDLL:
  """Opens compiled code.

  Raises:
    OSError: it can not be loaded here.
    ValueError: it is cut, or was compiled from another `blocks.c` than the one
      beside.
  """
  _check_whole(path)
  library = ctypes.CDLL(path)
  compiled = ctypes.c_uint32.in_dll(library, 'diloco_source_crc').value
  if compiled != zlib.crc32(SOURCE.read_bytes()):
    raise ValueError(f'{path} was compiled from another blocks.c')
  for name, arguments in _ARGUMENTS.items():
    getattr(library, name).argtypes = arguments
  library.diloco_inspect.restype = ctypes.c_uint32
  return library


def _check_whole(path: str):
  """Refuses a cut file: the system maps it, and kills whoever reads the rest.

  An ELF file ends with the table of its sections, or else with what is loaded.

  Raises:
    ValueError: it is cut.
  """
  data = pathlib.Path(path).read_bytes()
  needed = _ELF.size
  if len(data) >= needed:
    if not data.startswith(b'\x7fELF\x02\x01'):
      return  # Of another system, which checks what it loads.
    segments, sections, segment_bytes, segment_count, *size = _ELF.unpack_from(
      data
    )
    needed = max(
      sections + math.prod(size), segments + segment_bytes * segment_count
    )
    if len(data) >= needed:
      for i in range(segment_count):
        begin, length = _SEGMENT.unpack_from(data, segments + i * segment_bytes)
        needed = max(needed, begin + length)
  if len(data) < needed:
    raise ValueError(f'{path} is cut: {len(data)} of {needed} bytes')


def encode(codec: 'BlockCodec', x: np.ndarray, data: np.ndarray) -> bool:
  """Encodes f32 [n] into uint8 `data`; False if it was not."""
  library = _library_for(codec)
  if library is None or not _plain(x, data):
    return False
  arguments = _codec(codec, x.size)
  return not library.diloco_encode(_at(x), *arguments, _at(data))


def decode(codec: 'BlockCodec', data: np.ndarray, x: np.ndarray) -> bool:
  """Decodes uint8 `data` into f32 [n]; False if it was not."""
  library = _library_for(codec)
  if library is None or not _plain(data, x):
    return False
  library.diloco_decode(_at(data), *_codec(codec, x.size), _at(x))
  return True


class Sgd(NamedTuple):
  """The factors of `outer.make_outer`."""

  lr: float
  momentum: float
  nesterov: bool


def sgd_send(
  codec: 'BlockCodec', sgd: Sgd, arrays: Sequence[np.ndarray], data: np.ndarray
) -> list[np.ndarray] | None:
  """Encodes what SGD makes of Δ, plus residual, into `data`.

  Args:
    arrays: Δ, trace, residual and Θ.

  Returns:
    The next trace, residual and Θ.
  """
  library = _library_for(codec)
  if library is None or not _vectors(*arrays) or not _plain(data):
    return None
  results = [np.empty_like(x) for x in arrays[1:]]
  vectors = _pointers([*arrays, *results])
  factors = -sgd.lr, sgd.momentum, sgd.nesterov
  declined = library.diloco_sgd_send(
    _at(vectors), *factors, *_codec(codec, arrays[0].size), _at(data)
  )
  return None if declined else results


def inspect(
  codec: 'BlockCodec', data: np.ndarray, n: int
) -> tuple[float, np.ndarray] | None:
  """Returns max |x|, NaN if any is, and Σ x² of each `SUM_VALUES` values.

  The values are those that `data` decodes to. None also if
  `weighted_sum_encoded` would decline the codec.
  """
  library = _library_for(codec)
  if library is None or TILE_VALUES % codec.block_size or not _plain(data):
    return None
  sums, room = _sums(n), np.empty(min(n, SUM_VALUES), np.float32)
  bits = library.diloco_inspect(
    _at(data), *_codec(codec, n), _at(sums), _at(room)
  )
  largest = math.nan if bits > _INFINITE else np.uint32(bits).view(np.float32)
  return float(largest), sums


def weighted_sum_encoded(
  codec: 'BlockCodec',
  factors: Sequence[float],
  datas: Sequence[np.ndarray],
  shape: tuple[int, ...],
) -> tuple[np.ndarray, np.ndarray]:
  """Returns Σ c·v in f32, in the order given, and Σ x² as `inspect` does.

  Args:
    datas: encoded v, each of which has been through `inspect`.
  """
  total = np.empty(shape, np.float32)
  sums = _sums(total.size)
  inputs = _pointers(datas), np.array(factors, np.float32)
  load().diloco_weighted_sum_encoded(
    *map(_at, inputs),
    len(datas),
    *_codec(codec, total.size),
    *(_at(total), _at(sums)),
  )
  return total, sums


def crc32(data: np.ndarray) -> int:
  """Returns `zlib.crc32` of a contiguous array's bytes."""
  library, whole = load(), data.nbytes // _CRC_BYTES * _CRC_BYTES
  crc = ctypes.c_uint32()
  if (
    library is None
    or whole < _CRC_BYTES_MIN
    or not _plain(data)
    or not library.diloco_crc32(_at(data), whole, ctypes.byref(crc))
  ):
    return zlib.crc32(data)
  rest = data.reshape(-1).view(np.uint8)[whole:]
  return zlib.crc32(rest, crc.value)


def _sums(n: int) -> np.ndarray:
  return np.empty(-(-n // SUM_VALUES), np.float64)


def _pointers(arrays: Sequence[np.ndarray]) -> np.ndarray:
  return np.array([_at(x) for x in arrays], np.uintp)


def _library_for(codec: 'BlockCodec') -> ctypes.CDLL | None:
  return load() if codec.bits in _BITS else None


def _codec(codec: 'BlockCodec', n: int) -> tuple[int, int, int, int]:
  return n, codec.block_size, codec.bits, codec.scale_bytes


def _plain(*arrays: np.ndarray) -> bool:
  """Returns True if each can be read as C does."""
  return all(
    isinstance(x, np.ndarray) and x.flags.c_contiguous and x.flags.aligned
    for x in arrays
  )


def _vectors(*arrays: np.ndarray) -> bool:
  """Returns True if all are f32 of one shape that C can read."""
  return _plain(*arrays) and all(
    x.dtype == np.float32 and x.shape == arrays[0].shape for x in arrays
  )


def _at(x: np.ndarray) -> int:
  return x.ctypes.data
