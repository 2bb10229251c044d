# SPDX-License-Identifier: Apache-2.0
"""A training loop of your own, in plain JAX, as a learner of a run.

    python experiments/own_loop.py runs/own                     # the syncer
    python experiments/own_loop.py runs/own 127.0.0.1:PORT 0    # learners 0, 1

Kill a learner and start it again: it goes on. They learn to add two digits.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco.learner.own_loop import Learner, Sync, start_syncer

SYNC = Sync(every=8, fragments=4, learners=2, steps=400)
OPTIMIZER = optax.adamw(3e-3)


def init():
  rng = np.random.default_rng(0)
  shapes = {'in': (20, 64), 'bias': (64,), 'out': (64, 19), 'scale': (19,)}
  return {k: jnp.asarray(rng.normal(0, 0.3, s), 'f') for k, s in shapes.items()}


def loss_of(params, x, y):
  hidden = jax.nn.relu(x @ params['in'] + params['bias'])
  logits = hidden @ params['out'] * params['scale']
  return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@jax.jit
def step(params, opt_state, x, y):
  loss, gradient = jax.value_and_grad(loss_of)(params, x, y)
  updates, opt_state = OPTIMIZER.update(gradient, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


def batch_at(number, position):
  a, b = np.random.default_rng([number, position]).integers(0, 10, (2, 32))
  return np.hstack([np.eye(10)[a], np.eye(10)[b]]).astype('f'), a + b


def train(workdir, syncer, number):
  given = syncer, init(), OPTIMIZER.init(init())
  with Learner(*given, learner=number, sync=SYNC, workdir=workdir) as run:
    params, opt_state = run.start()
    while not run.done:
      x, y = batch_at(number, run.position)
      params, opt_state, loss = step(params, opt_state, x, y)
      params, opt_state = run.boundary(params, opt_state, tokens=32, loss=loss)
  print(f'learner {number}: step {run.step}, loss {loss:.4f}')


if __name__ == '__main__':
  if len(sys.argv) > 2:
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]))
  else:
    with start_syncer(sys.argv[1], init(), SYNC) as run:
      print(f'the syncer listens at {run.address}', flush=True)
      run.wait()
