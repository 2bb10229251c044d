# SPDX-License-Identifier: Apache-2.0
"""Bytes by arithmetic are the bytes that the codecs write."""

import pytest

from diloco.fleets import traffic
from diloco.numerics import payload
from diloco.numerics.codec import NAMES, make_codec
from diloco.numerics.fragments import TensorSpec, make_layout

SPECS = {
  'embed': TensorSpec((257, 24), 'embedding'),
  'layers/mlp': TensorSpec((4, 24, 65), 'stacked'),
  'layers/norm': TensorSpec((4, 24), 'stacked'),
  'norm': TensorSpec((1,)),
}


@pytest.mark.parametrize('codec', NAMES)
@pytest.mark.parametrize(('block', 'scale'), [(128, 'bf16'), (8, 'f32')])
def test_bytes_are_those_of_a_real_layout(codec, block, scale):
  layout = make_layout(SPECS, 'balanced', 3, 'split')
  for pieces in layout.fragments:
    counted = sum(
      traffic.nbytes(piece.size, codec, block, scale) for piece in pieces
    )
    written = payload.payload_bytes(pieces, make_codec(codec, block, scale))
    assert counted == written


def test_bytes_by_hand():
  # 300 values of int4 in blocks of 128: 3 scales of 2 bytes, 150 of codes.
  assert traffic.nbytes(300, 'int4') == 3 * 2 + 150
  # 3 values of int1 take a byte, and their scale.
  assert traffic.nbytes(3, 'int1', 8, 'f32') == 4 + 1
  assert traffic.nbytes(0, 'int8') == 0


@pytest.mark.parametrize('codec', NAMES)
def test_per_value_is_the_limit(codec):
  values = 1 << 20
  each = traffic.bytes_per_value(codec, 64, 'f32')
  assert traffic.nbytes(values, codec, 64, 'f32') == each * values


def test_fragments_hold_the_whole_model():
  shares = traffic.fragment_shares(24, 0.23)
  assert shares[0] == 0.23 and len(shares) == 24
  assert sum(shares) == pytest.approx(1.0)
  assert traffic.fragment_shares(4, 0.0) == (0.25,) * 4


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ((1, 'int3'), "codec='int3': must be one of int1"),
    ((1, 'int4', 100), 'block_size=100: must be a positive multiple of 8'),
    ((1, 'int4', 128, 'f16'), "scale='f16': must be one of bf16, f32"),
    ((-1, 'int4'), 'values=-1: must be at least 0'),
  ],
)
def test_wrong_arguments_are_named(arguments, message):
  with pytest.raises(ValueError, match=message):
    traffic.nbytes(*arguments)
