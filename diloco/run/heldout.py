# SPDX-License-Identifier: Apache-2.0
"""The loss of a model on held-out text."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from diloco.data import text_windows
from diloco.models import api
from diloco.run import on_devices
from diloco.run.spec import RunSpec


class Heldout:
  """The run's held-out batches, and the compiled loss.

  Args:
    batches: number of batches of `run.eval_batch` sequences each; 0: all of the
      held-out text; None: `run.eval_batches`.
    devices: None: all of this process; see `on_devices`.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    batches: int | None = None,
    devices: Sequence[jax.Device] | None = None,
  ):
    config = run_spec.config
    text, seq_len = run_spec.text.heldout, config.data.seq_len
    count = config.run.eval_batches if batches is None else batches
    asked = config.run.eval_batch, count
    shape = text_windows.heldout_shape(text, seq_len, *asked)
    if count and shape != asked:
      logging.warning(
        'evaluates on %d batches of %d, all that the held-out text gives: '
        '%d of run.eval_batch=%d are asked for',
        *reversed(shape),
        *reversed(asked),
      )
    self._batches = text_windows.heldout_batches(text, seq_len, *shape)
    self._on_devices = on_devices.of_run(run_spec, devices)

    def loss_and_count(params, batch):
      loss, metrics = run_spec.model.loss(params, batch, jax.random.key(0))
      count = metrics.get(api.COUNTED, jnp.float32(1))
      return api.reported_loss(loss, metrics), count

    self._loss = self._on_devices.jit(loss_and_count)

  def loss(
    self,
    params: Mapping[str, np.ndarray],
    walk: Callable[[Sequence], Iterable] = iter,
  ) -> float:
    """Returns the mean loss in nats per predicted token.

    Args:
      params: path -> array.
      walk: yields the batches that it is given, such as to say how far it is.
    """
    return mean_loss(self.losses(params, walk))

  def losses(
    self,
    params: Mapping[str, np.ndarray],
    walk: Callable[[Sequence], Iterable] = iter,
  ) -> np.ndarray:
    """Returns loss and number of predicted tokens by batch, f64 [batches, 2].

    Batches are in the order of the text; arguments are those of `loss`.
    """
    placed = self._on_devices.place(params)
    told = [
      jax.device_get(self._loss(placed, self._on_devices.rows(batch)))
      for batch in walk(self._batches)
    ]
    return np.asarray(told, np.float64)


def mean_loss(losses: np.ndarray) -> float:
  """Returns the mean over all predicted tokens of what `losses` gave."""
  each, counts = losses.T
  if not counts.any():
    raise ValueError('data: no token of the held-out text counts in the loss')
  return float(np.average(each, weights=counts))
