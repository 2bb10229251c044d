# SPDX-License-Identifier: Apache-2.0
"""LoRA: adapters alone are trained, and with them merged the model is plain."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from diloco.config import pretrained, run_config
from diloco.config.sections import ConfigError
from diloco.lab.run import train
from diloco.models import api, lora
from diloco.models.decoder import make_decoder
from diloco.models.decoder_config import DecoderConfig, ExpertsConfig
from diloco.models.kinds import sizes_of
from diloco.run.heldout import Heldout
from diloco.run.spec import make_run_spec
from experiments import tests_tiny
from tests.learner import mesh_steps

SIZES = DecoderConfig(
  vocab=64, layers=2, d_model=16, heads=4, kv_heads=2, head_dim=6, d_ff=32,
  qkv_bias=True, dtype='bfloat16', lora_rank=3, lora_alpha=4.0,
)  # fmt: skip


@pytest.mark.parametrize('experts', [None, ExpertsConfig(4, 2)])
def test_the_table_of_trained_parameters_is_that_of_the_model(experts):
  sizes = dataclasses.replace(SIZES, experts=experts)
  model = make_decoder(sizes)
  shapes = api.check_model(model)
  trained = {
    path: (x.shape, model.roles[path])
    for path, x in shapes.items()
    if model.roles[path] != api.FROZEN
  }
  assert trained == sizes.trained == sizes.adapters
  assert shapes.keys() - trained.keys() == sizes.arrays.keys()
  for path, x in shapes.items():  # What products take in bfloat16 anyhow.
    assert (x.dtype == 'bfloat16') == (path in sizes.adapted), path


def test_merged_matrices_compute_the_same():
  sizes = dataclasses.replace(SIZES, dtype='float32')
  params = api.flatten(make_decoder(sizes).init(jax.random.key(0)))
  params = {
    path: jax.random.normal(jax.random.key(len(path)), x.shape)
    if path.endswith('_b')
    else x
    for path, x in params.items()
  }
  merged = lora.merged(sizes, {k: np.asarray(x) for k, x in params.items()})
  tokens = jax.random.randint(jax.random.key(2), (2, 9), 0, 64)
  plain = make_decoder(dataclasses.replace(sizes, lora_rank=0))
  without = {path: params[path] for path in merged}
  logits, same, other = (
    model.logits(api.unflatten(x), tokens)
    for model, x in (
      (make_decoder(sizes), params),
      (plain, merged),
      (plain, without),
    )
  )
  np.testing.assert_allclose(logits, same, atol=2e-5)
  assert np.abs(logits - other).max() > 0.1


def _config(folder, **model):
  config = tests_tiny.get_config()
  config.model.update(heads=4, kv_heads=4, head_dim=8)
  config.model.update(init_from=f'hf:{folder}', lora_rank=4, **model)
  config.inner.lr = 0.03
  config.protocol.total_steps = 80
  return config


def test_of_a_run_adapters_alone_are_trained_and_merged(tmp_path):
  mesh_steps.write_weights(tmp_path, 'decoder')
  config = run_config.build(_config(tmp_path))
  run_spec = make_run_spec(config)
  trained = train(run_spec)
  sizes = sizes_of(config.model)
  assert trained.parameters.keys() == sizes.adapters.keys()
  assert run_spec.parameters == sum(
    math.prod(shape) for shape, _ in sizes.adapters.values()
  )
  base = run_spec.weights.whole(run_spec.read_shapes)
  plain = dataclasses.replace(config.model, lora_rank=0)
  of_plain = make_run_spec(dataclasses.replace(config, model=plain))
  # B is 0 at first: the model is what it was.
  at_first = Heldout(of_plain, 2).loss(base)
  assert Heldout(run_spec, 2).loss(run_spec.initial_parameters()) == (
    pytest.approx(at_first, abs=1e-6)
  )
  assert trained.loss < at_first - 0.3, (trained.loss, at_first)
  merged = lora.merged(sizes, base | trained.parameters)
  assert Heldout(of_plain, 2).loss(merged) == pytest.approx(
    Heldout(run_spec, 2).loss(trained.parameters), abs=1e-5
  )


def test_what_can_not_be_is_named(tmp_path):
  alone = _config(tmp_path)
  alone.model.init_from = ''
  with pytest.raises(ConfigError, match='lora_rank=4: needs'):
    run_config.build(alone)
  section = {'model': {'lora_rank': 4}}
  (tmp_path / 'config.json').write_text(json.dumps(section))
  (tmp_path / 'parameters').mkdir()
  with pytest.raises(ValueError, match='its parameters are adapters alone'):
    pretrained.keys_of(str(tmp_path))
