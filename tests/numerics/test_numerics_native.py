# SPDX-License-Identifier: Apache-2.0
"""The compiled code gives the bits of numpy's, which is the reference."""

import math
import pathlib
import subprocess
import sys
import zlib

import jax
import numpy as np
import pytest

from diloco.numerics import codec, merge, native, outer, payload
from diloco.numerics.fragments import TensorSpec, make_layout
from diloco.run import payload_parts

ROOT = pathlib.Path(__file__).parents[2]
F32 = np.finfo(np.float32)
SIZES = (1, 2, 7, 8, 9, 23, 24, 25, 127, 128, 129, 1000)
LARGE = 70_001  # More than one chunk.
FORMATS = [(b, s) for b in (8, 24, 128) for s in ('bf16', 'f32')]
SPECS = {
  'a': TensorSpec((3, 10, 13), 'stacked'),
  'b': TensorSpec((70_001,)),
  'c': TensorSpec(()),
  'd': TensorSpec((9,), 'averaged'),
}
(PIECES,) = make_layout(SPECS, 'balanced', 1).fragments


@pytest.fixture(scope='module')
def compiled(tmp_path_factory):
  """Compiles as an installation does, with the options of setup.py."""
  pytest.importorskip('setuptools', '77')
  folder = tmp_path_factory.mktemp('compiled')
  done = subprocess.run(
    [
      *(sys.executable, 'setup.py', '--quiet', 'build_ext'),
      *(f'--build-lib={folder}', f'--build-temp={folder}'),
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  found = list(folder.rglob('_blocks*.so'))
  if not found:
    pytest.skip(f'there is no compiler: {done.stderr.strip()[-200:]}')
  return native.open_library(str(found[0]))


@pytest.fixture
def both(compiled, monkeypatch):
  """Calls with the compiled code and with numpy; returns both results."""

  def call(function, *args):
    monkeypatch.setattr(native, 'load', lambda: compiled)
    fast = function(*args)
    monkeypatch.setattr(native, 'load', lambda: None)
    return fast, function(*args)

  return call


def vectors(n: int) -> list[np.ndarray]:
  """Returns vectors of n values of every kind that a round may meet."""
  with np.errstate(over='ignore'):
    return [x.astype(np.float32) for x in _vectors(n)]


def _vectors(n: int):
  rng = np.random.default_rng(n)
  x = rng.standard_normal(n)
  yield x
  yield 1e-3 * x
  yield x * 10.0 ** rng.uniform(-46, 38, n)  # Down to denormals.
  yield np.clip(x * 1e38, -F32.max, F32.max)
  yield x * 1e-38
  yield x * 1e-43
  yield np.where(rng.random(n) < 0.9, -0.0, x)
  yield np.zeros(n)
  yield -np.zeros(n)
  yield rng.integers(-15, 16, n) / 2 * 2.0 ** rng.integers(-140, 120)  # Ties.
  yield np.full(n, F32.max)
  for odd in (math.nan, math.inf, -math.inf):
    spoilt = x.copy()
    spoilt[rng.integers(0, n, min(n, 2))] = odd
    yield spoilt


def assert_same_bits(fast, slow):
  assert fast.dtype == slow.dtype and fast.shape == slow.shape
  assert fast.tobytes() == slow.tobytes()


@pytest.mark.parametrize('name', ['int4', 'int8', 'int2'])
def test_codecs(both, name):
  cases = [(n, *each) for n in (0, *SIZES) for each in FORMATS]
  for n, block, scale in (*cases, (LARGE, 128, 'bf16'), (LARGE, 24, 'f32')):
    chosen = codec.make_codec(name, block, scale)
    for x in vectors(n):
      fast, slow = both(chosen.encode, x)
      assert_same_bits(fast, slow)
      assert_same_bits(*both(chosen.decode, slow, n))


@pytest.mark.parametrize('name', ['int4', 'int8'])
@pytest.mark.parametrize('scale', ['bf16', 'f32'])
def test_any_bytes_decode_alike(both, name, scale):
  """So do bytes of no encoder, with NaN, negative or denormal scales."""
  chosen = codec.make_codec(name, 24, scale)
  rng = np.random.default_rng(0)
  for n in (1, 23, 5000):
    for _ in range(20):
      data = rng.integers(0, 256, chosen.nbytes(n), np.uint8)
      unaligned = np.concatenate([data[:1], data])[1:]
      with np.errstate(over='ignore'):
        assert_same_bits(*both(chosen.decode, data, n))
        assert_same_bits(*both(chosen.decode, unaligned, n))


def test_vectors_with_strides(both):
  x = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
  chosen = codec.make_codec('int4')
  assert_same_bits(*both(chosen.encode, x[::2]))
  assert np.equal(*both(merge.norm, x[::2]))


def test_norms(both):
  rng = np.random.default_rng(0)
  for n in (*SIZES, 65_535, 65_536, 65_537, *rng.integers(1, 300_000, 10)):
    x = rng.standard_normal(n) * 10.0 ** rng.uniform(-20, 15, n)
    fast, slow = both(merge.norm, x.astype(np.float32))
    assert fast == slow


@pytest.mark.parametrize('rule', list(merge.RULES))
@pytest.mark.parametrize('learners', [1, 2, 8])
def test_merge_rules(both, rule, learners):
  for n in (*SIZES, LARGE):
    for x in vectors(n)[:-3]:
      vs = [np.roll(x, m) for m in range(learners)]
      weights = [0.0, *range(1, learners)] if learners > 2 else [1.0] * learners
      with np.errstate(over='ignore', invalid='ignore'):
        assert_same_bits(*both(merge.RULES[rule].merge, vs, weights))


@pytest.mark.parametrize('rule', list(merge.RULES))
@pytest.mark.parametrize('learners', [1, 3])
@pytest.mark.parametrize('name', ['int4', 'int8'])
def test_encoded_contributions_merge_as_decoded_ones(
  compiled, monkeypatch, rule, learners, name
):
  """Some of them decoded, too: those of a learner of several hosts are."""
  monkeypatch.setattr(native, 'load', lambda: compiled)
  chosen = codec.make_codec(name)
  for n in (*SIZES, 65_536, 131_200):
    for x in vectors(n)[: -3 if n < LARGE // 2 else 2]:
      datas = [chosen.encode(np.roll(x, m)) for m in range(learners)]
      encoded = [chosen.inspect(data, (n, 1)) for data in datas]
      plain = [chosen.decode(data, n).reshape(n, 1) for data in datas]
      weights = [0.0, *range(1, learners)] if learners > 2 else [1.0] * learners
      merged = merge.RULES[rule].merge
      with np.errstate(over='ignore', invalid='ignore'):
        wanted = merged(plain, weights)
        assert_same_bits(merged(encoded, weights), wanted)
        assert_same_bits(merged([*encoded[:1], *plain[1:]], weights), wanted)


def test_checks_of_encoded_contributions(compiled, monkeypatch):
  monkeypatch.setattr(native, 'load', lambda: compiled)
  chosen = codec.make_codec('int4')
  for n in (*SIZES, LARGE):
    for x in vectors(n):
      data = chosen.encode(x)
      encoded, plain = chosen.inspect(data, (n,)), chosen.decode(data, n)
      fast, slow = (
        refusal(lambda v=v: payload_parts.checked({'x': v})[1])
        for v in (encoded, plain)
      )
      assert fast == slow
      assert np.array_equal(encoded.squares, native.squares(plain), True)


def test_checksums_are_those_of_zlib(compiled, monkeypatch):
  monkeypatch.setattr(native, 'load', lambda: compiled)
  rng = np.random.default_rng(0)
  for n in (*range(200), 4096, 70_001):
    data = rng.integers(0, 256, n + 1, np.uint8)
    for each in (data, data[1:], 0 * data, ~(0 * data)):
      assert native.crc32(each) == zlib.crc32(each)
  square = rng.standard_normal((33, 7))
  assert native.crc32(square) == zlib.crc32(square)
  with pytest.raises(ValueError, match='contiguous'):
    native.crc32(square[::2])


def arrays(rng, scale=1.0):
  return {
    p.name: np.asarray(scale * rng.standard_normal(p.shape), np.float32)
    for p in PIECES
  }


@pytest.mark.parametrize(
  'momentum, nesterov, anneal',
  [(0.9, True, None), (0.9, False, outer.Anneal(1, 3, 0.1)), (0.0, True, None)],
)
@pytest.mark.parametrize('name', ['int4', 'int8', 'int2', 'f32'])
def test_rounds(both, name, momentum, nesterov, anneal):
  optimizer = outer.make_outer(0.7, momentum, nesterov, anneal)
  chosen = codec.make_codec(name, 24)

  def rounds(feedback):
    rng = np.random.default_rng(0)
    state = outer.init(arrays(rng), optimizer)
    for scale in (1.0, 1e-3, 0.0, 1e-30, 1e-43):
      before = state
      state, data = outer.step(
        state, arrays(rng, scale), optimizer, chosen, PIECES, feedback
      )
      rebuilt = outer.rebuild(before.theta, data, chosen, PIECES)
      assert payload.crc(rebuilt, PIECES) == payload.crc(state.theta, PIECES)
      yield data
      yield from state.theta.values()
      yield from state.residual.values()
      yield from jax.tree.leaves(state.optimizer_state)

  for feedback in (True, False):
    fast, slow = both(lambda f=feedback: list(rounds(f)))
    assert len(fast) == len(slow)
    for x, y in zip(fast, slow):
      assert_same_bits(x, y)


def refusal(function, *args) -> str:
  try:
    return str(function(*args))
  except (ValueError, payload_parts.Unusable) as error:
    return str(error)


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf, -3e12, 1.0])
def test_refusals(both, value):
  optimizer, chosen = outer.make_outer(0.7, 0.9), codec.make_codec('int4')
  rng = np.random.default_rng(0)
  state, delta = outer.init(arrays(rng), optimizer), arrays(rng)
  delta['b'][[7, 70]] = value
  fast, slow = both(refusal, lambda: payload_parts.checked(delta)[1])
  assert fast == slow
  if not math.isfinite(value):
    assert fast == 'not finite'
    step = (outer.step, state, delta, optimizer, chosen, PIECES)
    fast, slow = both(refusal, *step)
    assert fast == slow == 'the outer update of b is not finite'


def test_code_of_another_source_is_refused(compiled, monkeypatch, tmp_path):
  other = tmp_path / 'blocks.c'
  other.write_text('// Newer.')
  monkeypatch.setattr(native, 'SOURCE', other)
  with pytest.raises(ValueError, match=r'another blocks\.c'):
    native.open_library(compiled._name)


@pytest.mark.parametrize('kept', [0, 3, 0.1, 0.5, 0.9, -1])
def test_a_cut_file_is_refused_and_numpy_runs(compiled, tmp_path, kept):
  """In a process of its own: what is not refused would kill this one."""
  whole = pathlib.Path(compiled._name).read_bytes()
  cut = tmp_path / '_blocks.so'
  cut.write_bytes(whole[: round(len(whole) * kept) if 0 < kept < 1 else kept])
  code = """
import importlib.machinery, logging, sys
from diloco.numerics import native
logging.basicConfig(format='%(message)s')
found = importlib.machinery.ModuleSpec(native.MODULE, None, origin=sys.argv[1])
native.importlib.util.find_spec = lambda name: found
assert native.load() is None
"""
  done = subprocess.run(
    [sys.executable, '-c', code, str(cut)],
    cwd=ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done
  said = f'numpy: {cut} is cut: {cut.stat().st_size} of '
  assert said in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_log_says_which_code_runs(monkeypatch, caplog):
  caplog.set_level('INFO')
  monkeypatch.setattr(native, 'MODULE', 'diloco.numerics._not_compiled')
  native.load.cache_clear()
  assert native.load() is None
  assert 'run in numpy' in caplog.text
  native.load.cache_clear()
