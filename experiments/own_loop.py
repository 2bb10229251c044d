# SPDX-License-Identifier: Apache-2.0
"""A training loop of your own, in plain JAX, as a learner of a run.

    diloco experiments/own_loop.py runs/own                     # the syncer
    diloco experiments/own_loop.py runs/own 127.0.0.1:PORT 0    # learners 0, 1

Kill a learner and start it again: it goes on. They learn to add two digits.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import diloco

SYNC = diloco.Sync(every=8, fragments=4, learners=2, steps=400)
OPTIMIZER = optax.adamw(3e-3)


def init():
  rng = np.random.default_rng(0)
  shapes = {'in': (20, 64), 'bias': (64,), 'out': (64, 19), 'scale': (19,)}
  return {k: jnp.asarray(rng.normal(0, 0.3, s), 'f') for k, s in shapes.items()}


@jax.jit
def step(params, opt_state, x, y):
  def loss_of(params):
    hidden = jax.nn.relu(x @ params['in'] + params['bias'])
    logits = hidden @ params['out'] * params['scale']
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

  loss, gradient = jax.value_and_grad(loss_of)(params)
  updates, opt_state = OPTIMIZER.update(gradient, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


def batch(m, position):
  a, b = np.random.default_rng([m, position]).integers(0, 10, (2, 32))
  return np.hstack([np.eye(10)[a], np.eye(10)[b]]).astype('f'), a + b


def train(workdir, syncer, m):
  given = syncer, init(), OPTIMIZER.init(init())
  with diloco.Learner(*given, learner=m, sync=SYNC, workdir=workdir) as run:
    params, opt_state = run.start()
    while not run.done:
      params, opt_state, loss = step(params, opt_state, *batch(m, run.position))
      params, opt_state = run.boundary(params, opt_state, tokens=32, loss=loss)
  print(f'learner {m}: step {run.step}, loss {loss:.4f}')


if __name__ == '__main__':
  if len(sys.argv) > 2:
    train(*sys.argv[1:3], int(sys.argv[3]))
  else:
    with diloco.start_syncer(sys.argv[1], init(), SYNC) as run:
      print(f'the syncer listens at {run.address}', flush=True)
      run.wait()
