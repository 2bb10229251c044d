# SPDX-License-Identifier: Apache-2.0
"""Text drawn from models whose chances are known."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.config.sections import MeshConfig
from diloco.evaluation import sampling
from diloco.models import api
from diloco.models.decoder import make_decoder
from diloco.models.decoder_config import DecoderConfig, ExpertsConfig
from diloco.run.on_devices import OnDevices

DECODER = DecoderConfig(
  vocab=19, layers=1, d_model=16, heads=2, kv_heads=1, head_dim=8, d_ff=16
)
PROMPT = bytes([3, 1, 4])


def _sampler(model, params, *settings):
  shapes = {path: x.shape for path, x in params.items()}
  return sampling.Sampler(
    api.language_of(model),
    OnDevices(model, shapes, MeshConfig()),
    params,
    *settings,
  )


def _sample(sampler, prompt, length, seed):
  """Returns what follows one prompt."""
  return [token for (token,) in sampler.sample([prompt], length, seed)]


def _model(logits):
  """A model that is its logits."""
  axes = {'table': (None, None)}
  return api.Model(init=None, loss=None, axes=axes, roles={}, logits=logits)


def _bigram(params, tokens):
  return params['table'][tokens]


def _drawn(table, length=2000, window=1, temperature=1.0, top_k=0, seed=0):
  params = {'table': np.log(np.asarray(table, np.float32))}
  sampler = _sampler(_model(_bigram), params, window, temperature, top_k)
  return _sample(sampler, b'\0', length, seed)


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


def _params(model):
  rng = np.random.default_rng(0)
  return {
    path: (0.4 * rng.standard_normal(leaf.shape) + ('norm' in path)).astype('f')
    for path, leaf in api.check_model(model).items()
  }


@pytest.fixture(scope='module')
def decoder():
  model = make_decoder(DECODER)
  return model, _params(model)


def test_without_heat_each_byte_is_the_likeliest_of_all_before(decoder):
  model, params = decoder
  sampler = _sampler(model, params, 12, 0.0, 0)
  drawn = _sample(sampler, PROMPT, 8, seed=5)
  text = [*PROMPT, *drawn]
  nested = api.unflatten(params)
  logits = jax.jit(model.logits)(nested, jnp.asarray([text]))[0]
  likeliest = np.argmax(logits, axis=-1).tolist()
  assert drawn == likeliest[len(PROMPT) - 1 : -1]


def test_what_left_the_window_is_forgotten(decoder):
  model, params = decoder
  sampler = _sampler(model, params, 4, 0.7, 5)
  one = _sample(sampler, PROMPT + bytes([7, 8, 9, 10]), 20, seed=5)
  other = _sample(sampler, bytes([0, 7, 8, 9, 10]), 20, seed=5)
  assert one == other


PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8]]


@pytest.mark.parametrize(
  'change',
  [{}, {'window': 3}, {'experts': ExpertsConfig(experts=4, top_k=2)}],
  ids=str,
)
def test_a_cache_gives_what_all_of_the_text_gives(change):
  change |= {'layers': 3, 'logit_cap': 9.0, 'attention_cap': 5.0}
  model = make_decoder(dataclasses.replace(DECODER, **change))
  params = _params(model)
  by_cache = _sampler(model, params, 24, 0.9, 5)
  by_text = _sampler(model._replace(language=None), params, 24, 0.9, 5)
  texts = [list(x.sample(PROMPTS, 16, seed=7)) for x in (by_cache, by_text)]
  assert texts[0] == texts[1]
  assert len({tuple(each) for each in texts[0]}) > 4


def test_beyond_its_room_a_cache_forgets_the_oldest(decoder):
  """One layer sees no further than that by itself."""
  model, params = decoder
  by_cache = _sampler(model, params, 8, 0.9, 5)
  by_text = _sampler(model._replace(language=None), params, 8, 0.9, 5)
  texts = [list(x.sample(PROMPTS, 30, seed=7)) for x in (by_cache, by_text)]
  assert texts[0] == texts[1]


def test_a_prompts_text_does_not_depend_on_those_after_it(decoder):
  sampler = _sampler(*decoder, 8, 0.9, 5)
  together = [first for first, *_ in sampler.sample(PROMPTS, 20, seed=7)]
  assert together == _sample(sampler, PROMPTS[0], 20, seed=7)


def test_a_seed_gives_the_same_text_and_another_another(decoder):
  model, params = decoder
  sampler = _sampler(model, params, 8, 1.0, 0)
  texts = [_sample(sampler, PROMPT, 40, seed) for seed in (5, 5, 6)]
  assert texts[0] == texts[1]
  assert texts[0] != texts[2]


def test_it_is_compiled_once():
  traced = []

  def logits(params, tokens):
    traced.append(tokens.shape)
    return _bigram(params, tokens)

  params = {'table': np.zeros((8, 8), np.float32)}
  sampler = _sampler(_model(logits), params, 6, 1.0, 3)
  for prompt in (b'\1', b'\1\2\3', b'\1\2\3\4\5\6\7'):
    _sample(sampler, prompt, 9, seed=1)
  assert traced == [(1, 6)] * 2  # The first token, and the others.


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
    table = {'table': np.zeros((8, 8), np.float32)}
    _sampler(_model(_bigram), table, window, temperature, top_k)


def test_foreign_bytes_of_a_prompt_are_named():
  sampling.check_prompt('é'.encode(), 256)
  with pytest.raises(ValueError, match=r'0xa9, 0xc3, but the .* 0 … 0x7f'):
    sampling.check_prompt('aéb'.encode(), 128)
  with pytest.raises(ValueError, match='is empty'):
    sampling.check_prompt(b'', 256)
