# SPDX-License-Identifier: Apache-2.0
"""A `Trainer` of kauldron as a learner of a run; nothing of it is changed.

Its train step calls the boundary, its `init_transform` begins with what the
learner has, its data go on where the learner's last process stopped. What
kauldron trains besides the parameters is carried. The parameters are sharded
over all devices. They learn to add two digits, as those of `own_loop` do.
"""

import contextlib
import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from kauldron import kd

import diloco
from experiments import own_loop

ROWS = 32  # Of a batch.


class Net(nn.Module):
  x: kd.kontext.Key = 'batch.x'

  @nn.compact
  def __call__(self, x):
    return nn.Dense(19)(nn.relu(nn.Dense(64)(x)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums(kd.data.Pipeline):
  batch: Any = own_loop.batch
  learner: int = 0
  position: int = 0

  def __iter__(self):
    rows = map(self.rows, itertools.count(self.position))
    return kd.data.iterators.NonCheckpointableIterator(source=self, iter=rows)

  def rows(self, position):
    x, y = self.batch(self.learner, position)
    return {'x': x, 'y': y[:, None].astype(np.int32)}


def trainer(workdir, steps, data=Sums(batch_size=ROWS), **fields):
  xent = kd.losses.SoftmaxCrossEntropyWithIntLabels
  sharded = kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
  return kd.train.Trainer(
    workdir=workdir,
    num_train_steps=steps,
    train_ds=data,
    model=Net(),
    optimizer=own_loop.OPTIMIZER,
    train_losses={'sum': xent(logits='preds', labels='batch.y')},
    sharding=kd.sharding.ShardingStrategy(params=sharded),
    writer=None,
    log_metrics_every=1000,  # Else step 100 compiles the step once more.
    **fields,
  )


class RunEnded(Exception):
  """Leaves kauldron's loop, which would go on to its last step."""


@jax.jit
def total(losses):
  return sum(state.compute() for state in losses.values())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LearnerStep(kd.train.TrainStep):
  run: diloco.Learner

  def step(self, state, batch, **options):
    state, aux = super().step(state, batch, **options | {'return_losses': True})
    given = state.params, state.replace(params=None)
    loss = total(aux.loss_states)
    params, rest = self.run.boundary(*given, tokens=ROWS, loss=loss)
    if self.run.done:
      raise RunEnded
    return rest.replace(params=params), aux


@dataclasses.dataclass(frozen=True)
class Begin(kd.ckpts.NoopTransform):
  state: kd.train.TrainState

  def transform_after_optimizer(self, state):
    return self.state


def train(workdir, syncer, m, sync, batch=own_loop.batch):
  """Trains to the end of the run; returns Θ."""
  mine = f'{workdir}/kauldron-{m}', 10 * sync.steps  # The run ends first.
  state = trainer(*mine).init_state()
  given = syncer, state.params, state.replace(params=None)
  with diloco.Learner(*given, learner=m, sync=sync, workdir=workdir) as run:
    params, rest = run.start()
    data = {'batch': batch, 'learner': m, 'position': run.position}
    trains = trainer(
      *mine,
      Sums(**data, batch_size=ROWS),
      trainstep=LearnerStep(run=run),
      init_transform=Begin(rest.replace(params=params)),
    )
    with contextlib.suppress(RunEnded):
      trains.train()
    return run.parameters()
