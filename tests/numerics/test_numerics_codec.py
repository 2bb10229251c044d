# SPDX-License-Identifier: Apache-2.0
"""Codecs against a reference that packs value by value, and their bounds."""

import math
import struct

import jax.numpy as jnp
import numpy as np
import pytest

from diloco.numerics import codec

BITS = {f'int{bits}': bits for bits in range(1, 9)}
BLOCK_CODECS = tuple(BITS)
SIGNED = BLOCK_CODECS[2:]  # Their levels are -L … L.
LEVEL_MAX = {'int1': 1, 'int2': 3}
LEVEL_MAX |= {name: 2 ** (BITS[name] - 1) - 1 for name in SIGNED}
DIVISOR = dict(zip(SIGNED, (3.48, 7.47, 15.43, 31.37, 63.25, 127.0)))
# Those of the table, and every other row of blocks that it may get.
CODECS = codec.CODECS | {name: codec.in_blocks(BITS[name]) for name in BITS}
NAMES = tuple(CODECS)
F32_MAX = float(np.finfo(np.float32).max)
F32_TINY = float(np.finfo(np.float32).tiny)
SIZES = (0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 1000, 70_000)


def make(name: str, block_size: int = 128, scale: str = 'bf16'):
  return CODECS[name](block_size, scale)


def fields(bits: int) -> list[int]:
  return [field for field in (8, 4, 2, 1) if bits & field]


def gaussian(n: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).standard_normal(n, np.float32)


def as_bf16(value) -> np.float32:
  return np.float32(np.float32(value).astype(jnp.bfloat16))


def reference_decode(name, block, scale, data: bytes, n: int) -> list[float]:
  """The format of `codec`, value by value."""
  bits, blocks = BITS[name], math.ceil(n / block)
  if scale == 'bf16':
    stored = struct.unpack_from(f'<{blocks}H', data)
    scales = [
      struct.unpack('<f', struct.pack('<I', s << 16))[0] for s in stored
    ]
  else:
    scales = struct.unpack_from(f'<{blocks}f', data)
  codes, values = data[blocks * (2 if scale == 'bf16' else 4) :], []
  for b, block_scale in enumerate(scales):
    width = min(block, n - b * block)
    found, shift = [0] * width, 0
    for field in fields(bits):
      run = math.ceil(width * field / 8)
      for j in range(width):
        part = codes[j % run] >> (field * (j // run)) & (1 << field) - 1
        found[j] |= part << shift
      codes, shift = codes[run:], shift + field
    for code in found:
      if bits >= 3:
        level = code - (1 << bits) * (code >= 1 << (bits - 1))
      else:
        level = 2 * code - LEVEL_MAX[name]
      values.append(float(np.float32(level) * np.float32(block_scale)))
  assert not codes
  return values


def reference_value(name, x: np.ndarray, scale_type) -> tuple[list[int], float]:
  """Levels and scale of one block, from the formulas of `codec`."""
  stored = as_bf16 if scale_type == 'bf16' else np.float32
  if name in SIGNED:
    largest = np.float32(max(abs(v) for v in x))
    divisor = np.float32(DIVISOR[name])
    scale = stored(largest / divisor)
    return [round(float(v / scale)) for v in x] if scale else [0] * len(
      x
    ), scale
  sign = [1 if v >= 0 else -1 for v in x]
  mean = sum(abs(float(v)) for v in x) / len(x)
  large = [name == 'int2' and abs(v) > np.float32(1.248 * mean) for v in x]
  size = [3 if is_large else 1 for is_large in large]
  scale = sum(abs(float(v)) * k for v, k in zip(x, size))
  scale = stored(scale / sum(k * k for k in size))
  return [s * k for s, k in zip(sign, size)], scale


def scales_of(chosen, x: np.ndarray) -> np.ndarray:
  """The scale of each value's block, read from the bytes."""
  blocks = -(-x.size // chosen.block_size)
  data = chosen.encode(x)
  if chosen.scale == 'bf16':
    bits = data[: 2 * blocks].view('<u2').astype(np.uint32) << 16
    scales = bits.view(np.float32)
  else:
    scales = data[: 4 * blocks].view('<f4')
  return np.repeat(scales, chosen.block_size)[: x.size].astype(np.float64)


def awkward_vectors(count: int):
  """Tails, denormals, huge values, zeros, outliers; seeds 0 … count - 1."""
  for seed in range(count):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 400))
    x = rng.standard_normal(n)
    match seed % 6:
      case 1:
        x *= 10.0 ** rng.uniform(-46, 38)
      case 2:
        x = np.clip(x * 1e38, -F32_MAX, F32_MAX)
      case 3:
        x *= 10.0 ** rng.uniform(-8, 8, n)
      case 4:
        x *= rng.random(n) < 0.05
      case 5:
        x = rng.choice([-1.0, 1.0, 7.0, 7.5], n) * 2.0 ** rng.integers(
          -149, 120
        )
    yield seed, x.astype(np.float32)


@pytest.mark.parametrize('scale', ['bf16', 'f32'])
@pytest.mark.parametrize('name', BLOCK_CODECS)
@pytest.mark.parametrize('n', [1, 7, 24, 25, 31, 48, 53])
def test_bytes_are_those_of_the_reference(name, scale, n):
  chosen = make(name, 24, scale)
  x = gaussian(n, seed=n)
  decoded = chosen.decode(chosen.encode(x), n)
  expected = reference_decode(name, 24, scale, chosen.encode(x).tobytes(), n)
  np.testing.assert_array_equal(decoded, np.array(expected, np.float32))
  for start in range(0, n, 24):
    levels, block_scale = reference_value(name, x[start : start + 24], scale)
    np.testing.assert_array_equal(
      decoded[start : start + 24],
      np.array(levels, np.float32) * np.float32(block_scale),
    )


@pytest.mark.parametrize('n', SIZES)
@pytest.mark.parametrize('name', NAMES)
def test_byte_counts_are_exact(name, n):
  chosen = make(name)
  data = chosen.encode(gaussian(n))
  assert data.dtype == np.uint8 and data.shape == (chosen.nbytes(n),)
  if name == 'f32':
    expected = 4 * n
  elif name == 'bf16':
    expected = 2 * n
  else:
    tail = n % 128
    expected = 2 * math.ceil(n / 128) + (n // 128) * 16 * BITS[name]
    expected += sum(math.ceil(tail * f / 8) for f in fields(BITS[name]))
  assert data.size == expected
  assert chosen.decode(data, n).shape == (n,)


def test_bytes_by_hand():
  # 300 values of int4 in blocks of 128: 3 scales of 2 bytes, 150 of codes.
  assert make('int4').nbytes(300) == 3 * 2 + 150
  # 3 values of int1 take a byte, and their scale.
  assert make('int1', 8, 'f32').nbytes(3) == 4 + 1
  # 5 of int6 take 3 bytes of 4-bit fields and 2 of 2-bit ones.
  assert make('int6').nbytes(5) == 2 + 3 + 2
  assert codec.bytes_per_value('int4') == 0.5 + 2 / 128
  assert codec.bytes_per_value('int8', 64, 'f32') == 1 + 4 / 64
  assert (
    codec.bytes_per_value('bf16') == 2 and codec.bytes_per_value('f32') == 4
  )


@pytest.mark.parametrize('bits', [0, 9, 16])
def test_a_row_that_can_not_be_packed_is_refused(bits):
  with pytest.raises(ValueError, match=f'{bits} bits: blocks pack 1 to 8 bits'):
    codec.in_blocks(bits)


@pytest.mark.parametrize('name', NAMES)
def test_every_value_survives(name):
  """A change of any one value's sign changes what is decoded there."""
  chosen, x = make(name, 24, 'f32'), gaussian(53)
  before = chosen.decode(chosen.encode(x), x.size)
  for i in range(x.size):
    x[i] *= -1
    after = chosen.decode(chosen.encode(x), x.size)
    x[i] *= -1
    changed = np.flatnonzero(after != before)
    assert changed.tolist() == ([i] if before[i] else []), i


@pytest.mark.parametrize('scale', ['bf16', 'f32'])
@pytest.mark.parametrize('name', SIGNED)
def test_error_is_at_most_half_a_step_of_the_block(name, scale):
  chosen = make(name, 64, scale)
  for seed, x in awkward_vectors(200):
    decoded = chosen.decode(chosen.encode(x), x.size)
    steps = scales_of(chosen, x)
    # The quotient x / step was rounded to f32, and so was the product. Blocks
    # whose scale would be denormal are zero.
    bound = 0.5 * steps * (1 + 1e-5)
    bound = np.where(steps == 0, LEVEL_MAX[name] * 1.1 * F32_TINY, bound)
    error = np.abs(decoded.astype(np.float64) - x)
    worst = np.argmax(error - bound)
    assert error[worst] <= bound[worst], f'{seed=} {x[worst]=} {steps[worst]=}'


@pytest.mark.parametrize('name', ['int1', 'int2'])
def test_error_is_never_larger_than_the_vector(name):
  chosen = make(name, 64)
  for seed, x in awkward_vectors(200):
    decoded = chosen.decode(chosen.encode(x), x.size).astype(np.float64)
    error = np.linalg.norm(decoded - x)
    assert error <= np.linalg.norm(x.astype(np.float64)) * (1 + 1e-5), (
      f'{seed=}'
    )


@pytest.mark.parametrize('name', NAMES)
def test_finite_values_decode_to_finite_values(name):
  chosen = make(name, 8)
  for seed, x in awkward_vectors(200):
    assert np.isfinite(chosen.decode(chosen.encode(x), x.size)).all(), (
      f'{seed=}'
    )
  for extreme in (F32_MAX, -F32_MAX):
    x = np.full(11, extreme, np.float32)
    x[::3] *= np.float32(0.7)
    assert np.isfinite(chosen.decode(chosen.encode(x), 11)).all()


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('bad', [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('name', NAMES)
def test_non_finite_values_stay_non_finite_and_in_their_block(name, bad):
  chosen = make(name, 8)
  x = gaussian(29)
  x[17] = bad
  decoded = chosen.decode(chosen.encode(x), 29)
  assert not np.isfinite(decoded[17])
  assert np.isfinite(decoded[:16]).all() and np.isfinite(decoded[24:]).all()


def test_more_bits_have_smaller_error_on_a_gaussian():
  x, errors = gaussian(1 << 17, seed=4), {}
  for name in NAMES:
    chosen = make(name)
    error = np.linalg.norm(chosen.decode(chosen.encode(x), x.size) - x)
    errors[name] = error / np.linalg.norm(x)
  assert errors['int1'] < 0.605 and errors['int2'] < 0.345  # Optima .603, .345.
  assert errors['int4'] < 0.115 and errors['int8'] < 0.0066
  assert list(map(errors.get, SIGNED)) == sorted(
    (errors[name] for name in SIGNED), reverse=True
  )
  assert errors['bf16'] < 0.0017 and errors['f32'] == 0


def test_bf16_is_the_nearest_bfloat16():
  bits = np.random.default_rng(5).integers(0, 1 << 32, 100_000, np.uint32)
  ties = np.arange(0, 1 << 32, 0x8000, np.uint64).astype(np.uint32)
  x = np.concatenate([bits, ties]).view(np.float32)
  x = x[np.abs(x) < 3.38e38]
  chosen = codec.make_codec('bf16')
  expected = x.astype(jnp.bfloat16).astype(np.float32)
  actual = chosen.decode(chosen.encode(x), x.size)
  np.testing.assert_array_equal(actual.view('u4'), expected.view('u4'))


@pytest.mark.parametrize('name', NAMES)
def test_chunks_leave_no_trace(name):
  # 70,000 values take two chunks; cut at a block they are as two vectors.
  chosen = make(name)
  x = gaussian(70_000, seed=6)
  whole = chosen.decode(chosen.encode(x), x.size)
  parts = [
    chosen.decode(chosen.encode(p), p.size) for p in np.split(x, [12_800])
  ]
  np.testing.assert_array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize('name', NAMES)
def test_encoding_neither_changes_nor_shares_its_input(name):
  chosen = make(name)
  x = gaussian(300)
  before = x.copy()
  data = chosen.encode(x)
  np.testing.assert_array_equal(x, before)
  assert not np.shares_memory(data, x)
  assert not np.shares_memory(chosen.decode(data, 300), data)


@pytest.mark.parametrize('name', NAMES)
def test_wrong_length_is_refused(name):
  chosen = make(name)
  data = chosen.encode(gaussian(200))
  for wrong in (data[:-1], np.append(data, np.uint8(0)), data.view(np.int8)):
    with pytest.raises(ValueError, match=name):
      chosen.decode(wrong, 200)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    (('int4', 0), 'int4 with block 0'),
    (('int4', -8), 'int4 with block -8'),
    (('int8', 12), 'int8 with block 12'),
    (('int4', 8.0), 'int4 with block 8.0'),
    (('int3', 128), "codec 'int3'"),
    (('int4', 128, 'f16'), "scale 'f16'"),
  ],
)
def test_wrong_arguments_are_named(arguments, message):
  with pytest.raises(ValueError, match=message):
    codec.make_codec(*arguments)


def test_golden_int4():
  # By hand: the largest value is 7.47, so the scale is 7.47 / 7.47 = 1, in
  # bf16 0x3f80, little-endian 80 3f. Levels, ties to even (1.5 and 2.5 to 2):
  #   7.47 -> 7   1.5 -> 2   2.5 -> 2   -3.4 -> -3 = 0xd
  #   0.2 -> 0   -1 -> -1 = 0xf   -7 -> -7 = 0x9   4 -> 4
  # Low nibbles are the first half, high ones the second: 07 f2 92 4d. The tail
  # 14.94, -2, 6 has scale 2 (00 40), levels 7, -1, 3, and runs of two values:
  # (7, 3) and (-1, -): 37 0f.
  x = [7.47, 1.5, 2.5, -3.4, 0.2, -1.0, -7.0, 4.0, 14.94, -2.0, 6.0]
  data = codec.make_codec('int4', block_size=8).encode(np.array(x, np.float32))
  assert data.tobytes().hex(' ') == '80 3f 00 40 07 f2 92 4d 37 0f', (
    'The int4 format changed. Learners and syncers of different versions can '
    'no longer talk: raise PROTOCOL_VERSION, then update this golden.'
  )
