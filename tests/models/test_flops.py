# SPDX-License-Identifier: Apache-2.0
"""The convention of FLOPs against the products that are really traced."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from diloco.models import flops
from diloco.models.decoder import make_decoder
from diloco.models.decoder_config import DecoderConfig, ExpertsConfig

CONFIG = DecoderConfig(
  vocab=32, layers=3, d_model=16, heads=4, kv_heads=2, head_dim=8, d_ff=24
)
BATCH, LENGTH = 2, 8


def _traced(jaxpr, times: int = 1) -> int:
  """2·m·n·k of every matrix product; the body of a scan as often as it runs."""
  count = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      (left, _), _ = equation.params['dimension_numbers']
      shape = equation.invars[0].aval.shape
      summed = math.prod(shape[axis] for axis in left)
      count += 2 * times * math.prod(equation.outvars[0].aval.shape) * summed
    inner = times * equation.params.get('length', 1)
    for value in equation.params.values():
      for each in value if isinstance(value, tuple | list) else (value,):
        each = getattr(each, 'jaxpr', each)
        if hasattr(each, 'eqns'):
          count += _traced(each, inner)
  return count


def _of_step(config: DecoderConfig) -> int:
  model = make_decoder(config)
  params = jax.eval_shape(model.init, jax.random.key(0))
  tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)

  def loss(params, tokens):
    return model.loss(params, {'tokens': tokens}, jax.random.key(0))[0]

  return _traced(jax.make_jaxpr(jax.grad(loss))(params, tokens).jaxpr)


@pytest.mark.parametrize('changes', [{}, {'tied': True}, {'layers': 1}])
def test_they_are_the_products_of_a_step(changes):
  config = dataclasses.replace(CONFIG, **changes)
  assert flops.step_flops(config, BATCH, LENGTH).total == _of_step(config)


def test_what_is_computed_again_is_not_counted():
  config = dataclasses.replace(CONFIG, remat='full')
  assert flops.step_flops(config, BATCH, LENGTH).total < _of_step(config)


def test_of_experts_those_that_are_asked():
  config = dataclasses.replace(CONFIG, experts=ExpertsConfig(8, 2))
  dense = flops.active_parameters(CONFIG)
  mlp, router = 3 * 16 * 24, 16 * 8
  found = flops.active_parameters(config)
  assert found - dense == CONFIG.layers * (mlp + router)
