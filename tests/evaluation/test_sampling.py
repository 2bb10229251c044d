# SPDX-License-Identifier: Apache-2.0
"""Text drawn from models whose chances are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.evaluation import sampling
from diloco.models import api
from diloco.models.decoder import make_decoder
from diloco.models.decoder_config import DecoderConfig

DECODER = DecoderConfig(
  vocab=19, layers=1, d_model=16, heads=2, kv_heads=1, head_dim=8, d_ff=16
)
PROMPT = bytes([3, 1, 4])


def _model(logits):
  """A model that is its logits."""
  return api.Model(init=None, loss=None, axes={}, roles={}, logits=logits)


def _bigram(params, tokens):
  return params['table'][tokens]


def _drawn(table, length=2000, window=1, temperature=1.0, top_k=0, seed=0):
  params = {'table': np.log(np.asarray(table, np.float32))}
  sampler = sampling.Sampler(
    _model(_bigram), params, window, temperature, top_k
  )
  return list(sampler.sample(b'\0', length, seed))


def _shares(drawn, vocab):
  return np.bincount(drawn, minlength=vocab) / len(drawn)


def test_draws_have_the_models_chances():
  chances = np.array([0.5, 0.3, 0.15, 0.05])
  drawn = _drawn(np.tile(chances, (4, 1)))
  # Three standard deviations of 2,000 draws.
  deviations = np.sqrt(chances * (1 - chances) / 2000)
  assert (abs(_shares(drawn, 4) - chances) < 3 * deviations).all()


def test_temperature_is_a_power_of_the_chances():
  chances = np.array([0.5, 0.3, 0.2])
  drawn = _drawn(np.tile(chances, (3, 1)), temperature=0.5)
  squared = chances**2 / np.sum(chances**2)
  deviations = np.sqrt(squared * (1 - squared) / 2000)
  assert (abs(_shares(drawn, 3) - squared) < 3 * deviations).all()


def test_the_k_likeliest_keep_their_ratio():
  drawn = _drawn(np.tile([0.1, 0.45, 0.15, 0.3], (4, 1)), top_k=2)
  shares = _shares(drawn, 4)
  assert shares[0] == shares[2] == 0
  assert abs(shares[1] - 0.6) < 3 * np.sqrt(0.6 * 0.4 / 2000)


def test_each_byte_follows_the_one_before():
  turning = np.full((3, 3), 1e-9)
  for byte in range(3):
    turning[byte, (byte + 1) % 3] = 1
  assert _drawn(turning, length=7, window=4) == [1, 2, 0, 1, 2, 0, 1]


def test_a_token_that_is_no_byte_is_never_drawn():
  chances = np.full((300, 300), 1e-6)
  chances[:, 299] = 1
  assert max(_drawn(chances, length=50)) < 256


@pytest.fixture(scope='module')
def decoder():
  model = make_decoder(DECODER)
  rng = np.random.default_rng(0)
  shapes = api.check_model(model)
  return model, {
    path: (0.4 * rng.standard_normal(leaf.shape) + ('norm' in path)).astype('f')
    for path, leaf in shapes.items()
  }


def test_without_heat_each_byte_is_the_likeliest_of_all_before(decoder):
  model, params = decoder
  sampler = sampling.Sampler(model, params, 12, 0.0, 0)
  drawn = list(sampler.sample(PROMPT, 8, seed=5))
  text = [*PROMPT, *drawn]
  nested = api.unflatten(params)
  logits = jax.jit(model.logits)(nested, jnp.asarray([text]))[0]
  likeliest = np.argmax(logits, axis=-1).tolist()
  assert drawn == likeliest[len(PROMPT) - 1 : -1]


def test_what_left_the_window_is_forgotten(decoder):
  model, params = decoder
  sampler = sampling.Sampler(model, params, 4, 0.7, 5)
  one = list(sampler.sample(PROMPT + bytes([7, 8, 9, 10]), 20, seed=5))
  other = list(sampler.sample(bytes([0, 7, 8, 9, 10]), 20, seed=5))
  assert one == other


def test_a_seed_gives_the_same_text_and_another_another(decoder):
  model, params = decoder
  sampler = sampling.Sampler(model, params, 8, 1.0, 0)
  texts = [list(sampler.sample(PROMPT, 40, seed)) for seed in (5, 5, 6)]
  assert texts[0] == texts[1]
  assert texts[0] != texts[2]


def test_it_is_compiled_once():
  traced = []

  def logits(params, tokens):
    traced.append(tokens.shape)
    return _bigram(params, tokens)

  params = {'table': np.zeros((8, 8), np.float32)}
  sampler = sampling.Sampler(_model(logits), params, 6, 1.0, 3)
  for prompt in (b'\1', b'\1\2\3', b'\1\2\3\4\5\6\7'):
    list(sampler.sample(prompt, 9, seed=1))
  assert traced == [(1, 6)]


@pytest.mark.parametrize(
  ('window', 'temperature', 'top_k', 'problem'),
  [
    (0, 1.0, 0, 'window=0: must be at least 1'),
    (4, -0.1, 0, 'temperature=-0.1: must be finite and at least 0'),
    (4, float('nan'), 0, 'temperature=nan'),
    (4, float('inf'), 0, 'temperature=inf'),
    (4, 1.0, -1, 'top_k=-1: must be at least 0'),
  ],
)
def test_a_number_out_of_range_is_named(window, temperature, top_k, problem):
  with pytest.raises(ValueError, match=problem):
    sampling.Sampler(_model(_bigram), {}, window, temperature, top_k)


def test_foreign_bytes_of_a_prompt_are_named():
  sampling.check_prompt('é'.encode(), 256)
  with pytest.raises(ValueError, match=r'0xa9, 0xc3, but the .* 0 … 0x7f'):
    sampling.check_prompt('aéb'.encode(), 128)
  with pytest.raises(ValueError, match='is empty'):
    sampling.check_prompt(b'', 256)
