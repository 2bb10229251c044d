# SPDX-License-Identifier: Apache-2.0
"""Train loops that are not ours, as processes of a run.

    python -m tests.processes.loops --workdir=DIR syncer plain|nnx
    python -m tests.processes.loops --workdir=DIR HOST:PORT plain|nnx NUMBER
    python -m tests.processes.loops --workdir=DIR HOST:PORT sharded NUMBER \\
      0|1 COORDINATOR    # Both hosts of a learner.

A loop waits for data at position `GATE` until the file 'go' is in the workdir,
so that a test can do something on the way, however slow the machine is.
"""

import dataclasses
import functools
import pathlib
import sys
import time

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco.checkpoint.parameters import write_parameters
from diloco.learner.own_loop import Learner, start_syncer
from experiments import own_loop

GATE, STEPS = 120, 160
SYNC = dataclasses.replace(
  own_loop.SYNC,
  steps=STEPS,
  config={'run.step_floor_s': 0.02, 'checkpoint.learner_every_steps': 10},
)


class Net(nnx.Module):
  """The network of `own_loop`, in Flax NNX."""

  def __init__(self):
    rngs = nnx.Rngs(0)
    self.first = nnx.Linear(20, 64, rngs=rngs)
    self.last = nnx.Linear(64, 19, rngs=rngs)

  def __call__(self, x):
    return self.last(jax.nn.relu(self.first(x)))


@functools.cache
def net():
  return nnx.split(Net(), nnx.Param)


@jax.jit
def nnx_step(state, opt_state, x, y):
  def loss_of(state):
    logits = nnx.merge(net()[0], state)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

  loss, gradient = jax.value_and_grad(loss_of)(state)
  updates, opt_state = own_loop.OPTIMIZER.update(gradient, opt_state, state)
  return optax.apply_updates(state, updates), opt_state, loss


def sharded_init():
  """Returns the parameters of `own_loop`, cut over the devices of all hosts."""
  mesh = Mesh(jax.devices(), ('fsdp',))
  cut = {'in': (None, 'fsdp'), 'bias': ('fsdp',), 'out': ('fsdp',)}

  def placed(path, x):
    where = NamedSharding(mesh, PartitionSpec(*cut.get(path, ())))
    return jax.make_array_from_callback(
      x.shape, where, np.asarray(x).__getitem__
    )

  return {path: placed(path, x) for path, x in own_loop.init().items()}


LOOPS = {
  'sharded': (sharded_init, own_loop.step),
  'plain': (own_loop.init, own_loop.step),
  'nnx': (lambda: jax.tree.map(lambda x: x, net()[1]), nnx_step),
}


def main(
  workdir: str,
  syncer: str,
  kind: str,
  number: str = '0',
  host: str = '0',
  coordinator: str = '',
):
  number = int(number)
  if coordinator:
    jax.distributed.initialize(coordinator, 2, int(host))
  init, step = LOOPS[kind]
  params = init()
  if syncer == 'syncer':
    with start_syncer(workdir, params, SYNC) as run:
      print(f'the syncer listens at {run.address}', flush=True)
      run.wait()
    return
  given = syncer, params, jax.jit(own_loop.OPTIMIZER.init)(params)
  with Learner(*given, learner=number, sync=SYNC, workdir=workdir) as learner:
    params, opt_state = learner.start()
    while not learner.done:
      position = learner.position
      while position >= GATE and not pathlib.Path(workdir, 'go').exists():
        time.sleep(0.02)
      batch = own_loop.batch(number, position)
      params, opt_state, loss = step(params, opt_state, *batch)
      params, opt_state = learner.boundary(
        params, opt_state, tokens=32, loss=loss
      )
    if coordinator:
      return  # Each host has a part of Θ.
    names = [
      jax.tree_util.keystr(path, simple=True, separator='/')
      for path, _ in jax.tree_util.tree_leaves_with_path(params)
    ]
    theta = map(np.asarray, jax.tree.leaves(learner.parameters()))
    write_parameters(
      pathlib.Path(workdir, f'theta-{number}'), dict(zip(names, theta))
    )


if __name__ == '__main__':
  folder, *words = sys.argv[1:]
  main(folder.removeprefix('--workdir='), *words)
