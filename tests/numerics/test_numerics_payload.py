# SPDX-License-Identifier: Apache-2.0
"""A fragment's bytes: pieces in order, each alone; proven by their CRC."""

import struct
import zlib

import numpy as np
import pytest

from diloco.numerics import codec, payload
from diloco.numerics.fragments import TensorSpec, make_layout

SPECS = {
  'a': TensorSpec((3, 5, 7), 'stacked'),
  'b': TensorSpec((11,)),
  'c': TensorSpec(()),
}
(PIECES,) = make_layout(SPECS, 'balanced', 1).fragments


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  return {
    p.name: np.asarray(rng.standard_normal(p.shape), np.float32) for p in PIECES
  }


@pytest.mark.parametrize('name', codec.CODECS)
def test_each_piece_is_encoded_alone_in_order(name):
  chosen = codec.make_codec(name, 16)
  values = arrays()
  data = payload.encode(values, PIECES, chosen)
  assert data.size == payload.payload_bytes(PIECES, chosen)
  expected = [chosen.encode(values[p.name].reshape(-1)) for p in PIECES]
  np.testing.assert_array_equal(data, np.concatenate(expected))
  decoded = payload.decode(data, PIECES, chosen)
  for p in PIECES:
    alone = chosen.decode(chosen.encode(values[p.name].reshape(-1)), p.size)
    np.testing.assert_array_equal(decoded[p.name], alone.reshape(p.shape))
    assert decoded[p.name].dtype == np.float32


def test_wrong_length_is_refused():
  chosen = codec.make_codec('int4')
  data = payload.encode(arrays(), PIECES, chosen)
  for wrong in (data[1:], np.append(data, np.uint8(0)), data.reshape(1, -1)):
    with pytest.raises(ValueError, match=r'payload is uint8'):
      payload.decode(wrong, PIECES, chosen)


@pytest.mark.parametrize(
  'wrong', [np.zeros((2, 2), np.float32), np.zeros(4, np.float64)]
)
def test_wrong_arrays_are_refused_by_a_named_error(wrong):
  """The error is no `assert`, which `python -O` leaves out."""
  (pieces,) = make_layout({'w': TensorSpec((4,))}, 'balanced', 1).fragments
  for refused in (
    lambda: payload.encode({'w': wrong}, pieces, codec.make_codec('int4')),
    lambda: payload.crc({'w': wrong}, pieces),
    lambda: codec.make_codec('int4').encode(wrong.astype(np.float64)),
    lambda: codec.make_codec('bf16').encode(wrong.astype(np.float64)),
  ):
    with pytest.raises(ValueError, match='float32'):
      refused()


def test_crc_is_that_of_the_crcs_of_the_little_endian_bytes():
  values = arrays()
  crcs = [
    zlib.crc32(struct.pack(f'<{p.size}f', *values[p.name].reshape(-1)))
    for p in PIECES
  ]
  packed = b''.join(crc.to_bytes(4, 'little') for crc in crcs)
  assert payload.crc(values, PIECES) == zlib.crc32(packed)


def test_crc_sees_every_bit_and_the_order_but_not_the_memory_layout():
  values = arrays()
  expected = payload.crc(values, PIECES)
  assert payload.crc(dict(reversed(values.items())), PIECES) == expected
  fortran = {name: np.array(v, order='F') for name, v in values.items()}
  assert payload.crc(fortran, PIECES) == expected
  assert payload.crc(values, PIECES[::-1]) != expected
  for piece in PIECES:
    changed = values | {piece.name: values[piece.name].copy()}
    flat = changed[piece.name].reshape(-1)
    flat[-1] = np.nextafter(flat[-1], np.float32(9))
    assert payload.crc(changed, PIECES) != expected
