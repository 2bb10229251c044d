# SPDX-License-Identifier: Apache-2.0
"""The arrays of data-parallel: one model, and the batches of all learners."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diloco.lab.health import Health
from diloco.lab.packing import Likes
from diloco.lab.placing import on_mesh
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.heldout import Heldout
from diloco.runtime.inner_device import InnerDevice


class GroupArrays:
  """An implementation of `diloco.lab.resumption.Holder`.

  Args:
    learners: number of learners.
  """

  def __init__(self, blueprint: Blueprint, learners: int):
    self._blueprint = blueprint
    self._shards = [blueprint.dataset(m) for m in range(learners)]
    self._heldout, self._health = Heldout(blueprint), Health(blueprint)
    self._whole = Heldout(blueprint, blueprint.config.lab.final_eval_batches)
    self._device = functools.cache(self._make_device)
    self._all = self._device(learners)
    self._params, self._inner = self._all.init(blueprint.initial_parameters())

  def step(self, positions: Mapping[int, int], lr: float, number: int) -> float:
    """Makes one step on a batch of each of some learners.

    Args:
      positions: index of each batch, by learner.
      lr: inner learning rate.
      number: number of the step.

    Returns:
      The loss over all these batches.
    """
    rows = [self._shards[m][at]['tokens'] for m, at in positions.items()]
    device = self._device(len(rows))
    self._params, self._inner, metrics = device.step(
      self._params,
      self._inner,
      device.put_batch({'tokens': np.concatenate(rows)}),
      lr,
      (0, number),
    )
    return float(metrics['loss'])

  def seen(self, final: bool = False) -> dict[str, Any]:
    """Returns held-out loss, nats per token, and the health of experts.

    Args:
      final: the run is over: use `lab.final_eval_batches` of that text.
    """
    heldout = self._whole if final else self._heldout
    return {
      'loss': heldout.loss(self._params),
      'health': self._health.of(self._params),
    }

  def parameters(self) -> dict[str, np.ndarray]:
    """Returns path -> f32 array."""
    return {path: np.asarray(x) for path, x in self._params.items()}

  @property
  def likes(self) -> Likes:
    mesh = next(iter(self._all.params_like.values())).sharding.mesh
    return Likes(mesh, self._all.state_like)

  def state(self) -> Sequence[Any]:
    return [self._params, self._inner]

  def go_on(self, state: Sequence[Any]):
    self._params, self._inner = state

  def _make_device(self, members: int) -> InnerDevice:
    """Compiles a step on the batches of `members` learners."""
    config = self._blueprint.config
    data = dataclasses.replace(config.data, batch=members * config.data.batch)
    config = dataclasses.replace(config, data=data)
    blueprint = dataclasses.replace(self._blueprint, config=config)
    return InnerDevice(*on_mesh(blueprint))
