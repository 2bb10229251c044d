# SPDX-License-Identifier: Apache-2.0
"""How is a model of your own trained, from two functions and without Flax?

The model predicts a byte from the one before it: `init` returns nested dicts of
arrays, `loss` a number and metrics, and `config.model.kind` names the function
that puts both together.

Look at: the code of this file, and the loss at the end.

Command: python -m diloco.lab --config=experiments/own_model.py --workdir=DIR
  python -m launch.local --config=experiments/own_model.py --workdir=DIR
Hardware: any CPU. Wall time: see experiments/README.md.
Variants: own_model.py:learners=4, own_model.py:quicktest.
"""

import jax
import jax.numpy as jnp

from diloco.models import api
from experiments import common


def model(sizes):
  def init(key):
    draws, shape = jax.random.split(key), (sizes.vocab, sizes.d_model)
    table, head = (0.1 * jax.random.normal(k, shape) for k in draws)
    return {'table': table, 'mlp': {'head': head, 'bias': jnp.zeros(shape[0])}}

  def loss(params, batch, key):
    before, after = batch['tokens'][:, :-1], batch['tokens'][:, 1:]
    hidden = jnp.tanh(params['table'][before])
    scores = hidden @ params['mlp']['head'].T + params['mlp']['bias']
    chances = jax.nn.log_softmax(scores)
    return -jnp.take_along_axis(chances, after[..., None], -1).mean(), {}

  return api.plain_model(init, loss)


@common.experiment('own-model', learners=2)
def get_config(config, args):
  config.model.kind = 'experiments.own_model:model'
  config.inner.lr = 1e-2
  config.protocol.update(learners=args.learners, fragments=3)
