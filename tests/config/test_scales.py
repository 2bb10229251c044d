# SPDX-License-Identifier: Apache-2.0
"""Every named size has the parameters, tokens and mesh that its row says.

On abstract shapes: nothing of it is allocated.
"""

import dataclasses
import math

import jax
import pytest

from diloco.config import run_config
from diloco.models import api, sharding
from diloco.models.decoder import make_decoder
from diloco.run.spec import decoder_config
from experiments import quickstart, recipe, scales

LARGE = sorted(set(scales.SCALES) - {scales.SMALL})


def _build(study, scale):
  config = study.get_config(f'scale={scale}')
  if config.data.source == 'text':
    config.data.path = 'texts'
  return run_config.build(config.lock())


def _shapes(config):
  model = make_decoder(decoder_config(config))
  shapes = api.check_model(model)
  return model, {path: leaf.shape for path, leaf in shapes.items()}


@pytest.mark.parametrize('scale', sorted(scales.SCALES))
def test_a_scale_has_its_parameters(scale):
  _, shapes = _shapes(_build(recipe, scale))
  count = sum(math.prod(shape) for shape in shapes.values())
  assert count == pytest.approx(scales.SCALES[scale]['parameters'], rel=0.02)


@pytest.mark.parametrize('scale', LARGE)
def test_a_scale_lies_evenly_on_its_mesh(scale):
  config = _build(recipe, scale)
  mesh = jax.sharding.AbstractMesh(
    (config.mesh.fsdp, config.mesh.expert, config.mesh.tensor),
    (sharding.FSDP, sharding.EXPERT, sharding.TENSOR),
  )
  model, shapes = _shapes(config)
  assert sharding.param_shardings(model.axes, shapes, mesh).keys() == (
    shapes.keys()
  )


@pytest.mark.parametrize('study', [recipe, quickstart])
@pytest.mark.parametrize('scale', LARGE)
def test_the_learners_share_the_token_budget(study, scale):
  config = _build(study, scale)
  data, protocol = config.data, config.protocol
  per_step = protocol.learners * data.batch * data.seq_len
  budget = scales.TOKENS_PER_PARAMETER * scales.active_parameters(scale)
  assert protocol.total_steps * per_step == pytest.approx(budget, rel=0.01)


def test_small_is_what_the_recipe_was_made_with():
  config = _build(recipe, scales.SMALL)
  assert config.protocol.total_steps == 2000
  assert (config.model.d_model, config.inner.lr) == (64, 8e-3)
  assert recipe.get_config('steps=6000').protocol.total_steps == 6000


def test_the_paper_s_protocol_is_an_argument():
  config = _build(recipe, 'small,paper')
  protocol, data = config.protocol, config.data
  assert (protocol.learners, data.shards, data.batch) == (8, 8, 4)
  assert (protocol.fragments, protocol.sync_every_steps) == (24, 24)
  assert (protocol.overlap_steps, protocol.quorum) == (2, 1)


def test_no_such_scale():
  with pytest.raises(ValueError, match='must be one of small, 150m, 1b, 5b'):
    recipe.get_config('scale=2b')


def test_a_token_passes_the_active_parameters():
  config = decoder_config(_build(recipe, 'moe'))
  chosen = dataclasses.replace(config.experts, experts=config.experts.top_k)
  active = dataclasses.replace(config, experts=chosen).parameters
  assert active == pytest.approx(scales.active_parameters('moe'), rel=0.02)
