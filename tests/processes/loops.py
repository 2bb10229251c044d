# SPDX-License-Identifier: Apache-2.0
"""Train loops that are not ours, as processes of a run.

    python -m tests.processes.loops --workdir=DIR syncer plain|nnx
    python -m tests.processes.loops --workdir=DIR HOST:PORT plain|nnx NUMBER
    python -m tests.processes.loops --workdir=DIR HOST:PORT sharded NUMBER \\
      0|1 COORDINATOR    # Both hosts of a learner.
    python -m tests.processes.loops --workdir=DIR syncer|HOST:PORT kauldron ...
    python -m tests.processes.loops --workdir=DIR alone kauldron

A loop's data come slowly from position `GATE` on until the file 'go' is in the
workdir, so that a test can do something on the way, however slow the machine
is. It goes on making steps: one that waited could not give its state away.
"""

import dataclasses
import functools
import json
import pathlib
import sys
import time

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from diloco.checkpoint.parameters import read_parameters, write_parameters
from diloco.learner.own_loop import Learner, Tree, start_syncer
from diloco.metrics.workdir import Workdir
from experiments import own_loop

GATE, STEPS = 120, 160
SLOW_S = 4.0  # A step; the syncer takes one that is silent for 10 s for dead.
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


def loop_of(init, step):
  """Returns what begins a loop, and the loop around a step."""

  def train(workdir, syncer, number, sync, batch):
    params = init()
    given = syncer, params, jax.jit(own_loop.OPTIMIZER.init)(params)
    with Learner(*given, learner=number, sync=sync, workdir=workdir) as learner:
      params, opt_state = learner.start()
      while not learner.done:
        rows = batch(number, learner.position)
        params, opt_state, loss = step(params, opt_state, *rows)
        params, opt_state = learner.boundary(
          params, opt_state, tokens=32, loss=loss
        )
      # Of several hosts each has a part of Θ.
      return learner.parameters() if jax.process_count() == 1 else None

  return init, train


def kauldron():
  """Returns the same of a `Trainer`, whose arrays lie on two devices."""
  jax.config.update('jax_num_cpu_devices', 2)
  from tests.processes import kauldron_loop

  def init():
    return kauldron_loop.trainer('unused', STEPS).init_state().params

  return init, kauldron_loop.train


LOOPS = {
  'sharded': lambda: loop_of(sharded_init, own_loop.step),
  'plain': lambda: loop_of(own_loop.init, own_loop.step),
  'nnx': lambda: loop_of(lambda: jax.tree.map(lambda x: x, net()[1]), nnx_step),
  'kauldron': kauldron,
}


def compare(workdir: pathlib.Path, init):
  """Prints losses of rows that nobody trained on, as JSON: as it started, of
  one `Trainer` alone, and of the run, which is over.
  """
  from tests.processes import kauldron_loop

  rows = (own_loop.batch(99, position) for position in range(32))
  x, y = map(np.concatenate, zip(*rows))

  @jax.jit
  def loss_of(params):
    logits = kauldron_loop.Net().apply({'params': params}, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

  # kauldron makes one step more than it is told.
  alone, _ = kauldron_loop.trainer(workdir / 'alone', STEPS - 1).train()
  start = init()
  theta = read_parameters(Workdir(workdir).parameters)
  params = {
    'start': start,
    'alone': alone.params,
    'run': Tree(start).nested(theta),
  }
  losses = {name: float(loss_of(value)) for name, value in params.items()}
  print('held out', json.dumps(losses))


def main(
  workdir: pathlib.Path,
  syncer: str,
  kind: str,
  number: str = '0',
  host: str = '0',
  coordinator: str = '',
):
  if coordinator:
    jax.distributed.initialize(coordinator, 2, int(host))
  init, train = LOOPS[kind]()
  if syncer == 'syncer':
    with start_syncer(workdir, init(), SYNC) as run:
      print(f'the syncer listens at {run.address}', flush=True)
      run.wait()
    return
  if syncer == 'alone':
    compare(workdir, init)
    return

  def batch(number, position):
    until_s = time.monotonic() + SLOW_S
    while position >= GATE and time.monotonic() < until_s:
      if (workdir / 'go').exists():
        break
      time.sleep(0.02)
    return own_loop.batch(number, position)

  theta = train(workdir, syncer, int(number), SYNC, batch)
  if theta is not None:
    write_parameters(workdir / f'theta-{number}', Tree(theta).to_host(theta))


if __name__ == '__main__':
  folder, *words = sys.argv[1:]
  main(pathlib.Path(folder.removeprefix('--workdir=')), *words)
