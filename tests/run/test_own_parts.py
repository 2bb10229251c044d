# SPDX-License-Identifier: Apache-2.0
"""Parts of the user's own: those of docs/extending.md train, others say why."""

import pathlib
import re
import sys

import pytest

from diloco.config import run_config
from diloco.config.sections import ConfigError
from diloco.lab.run import train
from diloco.run.spec import make_run_spec
from experiments import own_model

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENTED = {
  'inner.optimizer': 'lion',
  'outer.optimizer': 'heavy_ball',
  'merge.rule': 'median',
  'merge.embedding': 'median',
  'codec.up': 'half',
  'codec.down': 'half',
  'protocol.blend': 'partly',
  'data.source': 'counting',
}
# By key: a function, and what is said of it.
BROKEN = {
  'inner.optimizer': {
    'none': 'takes .*, must take .InnerConfig, dict, dict.: too many',
    'named': 'gave a str, must give an optax.GradientTransformation',
    'grows': r'its update of .* is float32 \(1,\), must be float32 \(',
  },
  'outer.optimizer': {
    'ascends': r'its first update goes along Δ \(.*such as -lr·Δ',
    'of_xla': 'must have numpy arrays alone: XLA has other bits',
  },
  'merge.rule': {
    'sums': 'the merge of 3 equal outer gradients is .* must be what they are',
    'normed': r'that slice of the merge; say Rule\(…, of_whole_tensors=True\)',
    'bare': r'gave a function, must give a .*\.Rule, such as Rule\(function\)',
  },
  'merge.embedding': {'whole': "fragments.embedding='split' cuts the tables"},
  'codec.up': {
    'as_is': 'its name is .f32., must be a text other than int1',
    'long': r'become uint8 \(4,\), must be numpy uint8 \(2,\)',
    'far': 'an error larger than they are',
    'silent': 'it decodes nan to finite values',
  },
  'protocol.blend': {'summed': r'three float32 \(3, 2\) its rule gives .*\(\)'},
  'data.source': {
    'text': 'gave a str, must give a diloco.data.corpus.Corpus',
    'large': r'has tokens 0 … 999, must be in 0 … 255, as model.vocab=256',
  },
}
MODULE = """
import dataclasses
import numpy as np
import optax
from diloco.data import corpus
from diloco.numerics import merge
from diloco.numerics.codec import FloatCodec

def none(): pass
def named(section, specs, axes): return 'adamw'
def grows(section, specs, axes):
  return optax.stateless(
    lambda grads, _: {name: x.reshape(-1)[:1] for name, x in grads.items()})

def ascends(section, anneal):
  return optax.GradientTransformation(lambda theta: (), lambda x, s, p: (x, s))
def of_xla(section, anneal): return optax.sgd(0.1, momentum=0.9)

def sums(section): return merge.Rule(lambda vs, weights: sum(vs))
def normed(section): return merge.Rule(merge.rda)
def whole(section): return merge.Rule(merge.rda, of_whole_tensors=True)
def bare(section): return merge.weighted_mean

@dataclasses.dataclass(frozen=True)
class Broken:
  name: str
  nbytes: object
  decoded: object
  block_values: int = 1
  def select(self, data, n, blocks):
    return data.view(np.int32)[blocks].view(np.uint8)
  encode = staticmethod(lambda x: x.view(np.uint8).copy())
  def decode(self, data, n): return self.decoded(data.view(np.float32))

def four(n): return 4 * n
def as_is(section): return FloatCodec('f32')
def long(section): return Broken('long', lambda n: 2 * n, lambda x: x)
def far(section): return Broken('far', four, lambda x: -x)
def silent(section): return Broken('silent', four, np.nan_to_num)

def summed(section): return lambda theta, new, since: (new + theta).sum()
def older(section): return lambda theta, new, since: 0.5 * (new + theta)

def text(section, seed): return 'a text'
def large(section, seed):
  tokens = np.arange(100_000, dtype=np.int32) % 1000
  return corpus.token_corpus('large', tokens, tokens)
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
  """The modules `documented` and `broken`, where modules are looked for."""
  page = (ROOT / 'docs' / 'extending.md').read_text()
  blocks = re.findall(r'```python\n(.*?)```', page, re.S)
  (tmp_path / 'documented.py').write_text('\n'.join(blocks))
  (tmp_path / 'broken.py').write_text(MODULE)
  monkeypatch.syspath_prepend(tmp_path)
  for name in ('documented', 'broken'):
    monkeypatch.delitem(sys.modules, name, raising=False)


def _config(module: str, **names):
  config = own_model.get_config('quicktest')
  config.model.d_model = 16
  config.update_from_flattened_dict(
    {key: f'{module}:{name}' for key, name in names.items()}
  )
  return config


@pytest.mark.usefixtures('modules')
def test_those_of_the_documentation_train():
  config = _config('documented', **DOCUMENTED)
  config.lab.eval_every_steps = 20
  trained = train(make_run_spec(run_config.build(config)))
  losses = [point.loss for point in trained.points]
  assert losses[-1] < losses[0] - 0.1


@pytest.mark.usefixtures('modules')
@pytest.mark.parametrize(
  ('key', 'name', 'message'),
  [(key, *each) for key, found in BROKEN.items() for each in found.items()],
)
def test_what_is_wrong_is_said_with_key_and_value(key, name, message):
  config = run_config.build(_config('broken', **{key: name}))
  with pytest.raises(ValueError, match=message) as found:
    make_run_spec(config, reads_text=key == 'data.source')
  assert str(found.value).startswith(f"{key}='broken:{name}': ")


@pytest.mark.usefixtures('modules')
def test_a_blend_keeps_nothing_older_than_the_copy():
  config = run_config.build(_config('broken', **{'protocol.blend': 'older'}))
  with pytest.raises(ValueError, match=r"^protocol.blend='broken:older'.*Θ"):
    train(make_run_spec(config))


@pytest.mark.parametrize('key', DOCUMENTED)
def test_a_name_that_is_none(key):
  with pytest.raises(ConfigError, match="or the 'package"):
    run_config.build(_config('a', **{key: 'b:c'}))
