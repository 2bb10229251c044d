# SPDX-License-Identifier: Apache-2.0
"""A learner's training loop.

The order within a step matters, and is tested: dispatch the step, do at its
boundary what the machine wants (blend in what came, copy what is due), and
only then look at the metrics of the step before, so that the devices always
have the next step.
"""

import dataclasses
import signal
import sys
import threading
import time

import jax
import numpy as np

from diloco.data import pipeline
from diloco.metrics import names
from diloco.metrics.writer import Writer
from diloco.numerics.schedule import make_schedule
from diloco.protocol import learner_io
from diloco.runtime import exchange as exchange_lib
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.device import Device
from diloco.runtime.host_copy import HostCopy
from diloco.transport.meter import SocketMeter


@dataclasses.dataclass(frozen=True)
class Dispatched:
  """An inner step whose metrics have not been looked at."""

  step: int  # Of this process, 1 for the first.
  metrics: dict[str, jax.Array]
  position: int  # Of the batch after it.
  global_step: int
  lr: float
  stall_s: float


class Training:
  """One learner's parameters, inner state and loop.

  Args:
    blueprint: of the run.
    learner: the id, which names the data shard too.
    device: compiled.
    host: the copy of Θ; its fragments are the first bases.
    exchange: with the syncer; not yet open.
    writer: of the metrics.
  """

  def __init__(
    self,
    blueprint: Blueprint,
    learner: int,
    device: Device,
    host: HostCopy,
    exchange: exchange_lib.Exchange,
    writer: Writer,
  ):
    config = blueprint.config
    self._config = config
    self._learner = learner
    self._device = device
    self._host = host
    self._exchange = exchange
    self._writer = writer
    self._schedule = make_schedule(
      config.inner.schedule,
      config.inner.lr,
      config.inner.warmup_steps,
      config.protocol.total_steps,
      config.inner.final_fraction,
    )
    self._dataset = pipeline.make_dataset(
      blueprint.text.train,
      config.data.seq_len,
      config.data.batch,
      config.data.shards,
      learner,
      config.seed,
    )
    self._params, self._state = device.init(blueprint.initial_parameters())
    fragments = range(len(blueprint.layout.fragments))
    self._bases = {p: host.fragment(p)[1] for p in fragments}
    self._snapshots: dict[int, dict[str, jax.Array]] = {}
    self._training = False
    self._position = 0
    self._step = 0
    self._pending: Dispatched | None = None
    self._reported_s = 0.0
    self._waited_s = 0.0
    self._free_s = 0.0  # Since when the step in flight could compute.
    self._left: learner_io.Leave | None = None
    self._stop = threading.Event()
    self._meter = SocketMeter() if sys.platform == 'linux' else None

  def stop(self, *_):
    """Leaves at the next boundary; also as a signal handler."""
    self._stop.set()
    self._exchange.interrupt()

  def run(self) -> learner_io.Leave:
    """Trains until the run is over, the syncer refuses, or `stop`."""
    self._exchange.open()
    while not self._training and self._goes_on():
      self._perform_next(wait=True)
    batches = pipeline.batches(self._dataset, self._position)
    self._reported_s = self._free_s = time.monotonic()
    while self._training and self._goes_on():
      self._inner_step(next(batches))
    batches.close()
    self._report()
    while self._goes_on():
      self._perform_next(wait=True)
    if self._left is None:
      self._exchange.leave('stopped')
      return learner_io.Leave('stopped')
    return self._left

  def _goes_on(self) -> bool:
    return self._left is None and not self._stop.is_set()

  def _inner_step(self, batch: dict[str, np.ndarray]):
    progress = self._progress()
    lr = self._schedule(progress)
    placed = self._device.put_batch(batch)
    self._params, self._state, metrics = self._device.step(
      self._params, self._state, placed, lr, (self._learner, self._position)
    )
    self._step += 1
    self._position += 1
    stall_s = self._boundary()
    self._report()
    self._pending = Dispatched(
      self._step,
      metrics,
      self._position,
      progress,
      lr,
      stall_s + self._waited_s,
    )
    self._waited_s = 0.0
    if self._config.protocol.overlap_steps == 0:
      self._wait_at_boundary()

  def _progress(self) -> int:
    """What the schedule is a function of: t, or the learner's own steps."""
    if self._config.inner.progress == 'own':
      return self._step
    return self._exchange.global_step

  def _boundary(self) -> float:
    """Between two steps; returns the seconds that it took."""
    began_s = time.monotonic()
    self._exchange.handle(learner_io.Boundary(self._device.tokens_per_step))
    while self._perform_next(wait=False):
      pass
    return time.monotonic() - began_s

  def _wait_at_boundary(self):
    """τ = 0: the step must be reported, or its round would never be due."""
    if self._exchange.waiting:
      self._report()
    began_s = time.monotonic()
    while self._exchange.waiting and self._goes_on():
      self._perform_next(wait=True)
    while self._perform_next(wait=False):
      pass
    self._free_s = time.monotonic()
    self._waited_s = self._free_s - began_s  # A stall of the next step.

  def _perform_next(self, wait: bool) -> bool:
    effect = self._exchange.next_boundary(wait)
    match effect:
      case None:
        return False
      case exchange_lib.INTERRUPT:
        pass
      case learner_io.Snapshot():
        self._snapshot(effect)
      case learner_io.Apply():
        self._apply(effect)
      case learner_io.HandIn():
        self._exchange.hand_in()
      case learner_io.Begin():
        self._position = effect.position
        self._training = True
      case learner_io.Cease():
        self._training = False
      case learner_io.Leave():
        self._left = effect
      case _:
        raise TypeError(f'Not for the loop: {effect!r}.')
    return True

  def _snapshot(self, effect: learner_io.Snapshot):
    p = effect.fragment
    theta = self._device.snapshot(p, self._params)
    if self._config.protocol.blend == 'carry':
      self._snapshots[p] = theta
    self._exchange.offer(effect, theta, self._bases[p])

  def _apply(self, effect: learner_io.Apply):
    """Blends in Θ_p; before the first step there is nothing to blend."""
    p = effect.fragment
    arrived = self._exchange.take_arrived(p, effect.version)
    if arrived is None:
      return
    self._bases[p] = arrived.host
    if not self._training:
      self._params = self._device.overwrite(p, self._params, arrived.device)
      return
    snapshot = self._snapshots[p] if effect.carry else arrived.device
    self._params = self._device.blend(p, self._params, arrived.device, snapshot)

  def _report(self):
    """Waits for the step before the one just dispatched, and tells of it."""
    pending, self._pending = self._pending, None
    if pending is None:
      return
    loss = float(pending.metrics['loss'])
    self._compute_to_floor()
    now_s = time.monotonic()
    step_s, self._reported_s = now_s - self._reported_s, now_s
    self._free_s = now_s
    self._exchange.handle(
      learner_io.Completed(
        tokens=self._device.tokens_per_step,
        position=pending.position,
        step_s=step_s,
        stall_s=min(pending.stall_s, step_s),
        loss=loss,
      )
    )
    self._write(pending, loss, step_s)

  def _compute_to_floor(self):
    """Sleeps where `run.step_floor_s` asks for longer steps.

    As if the devices were at it: what the boundary took was beside their work.
    """
    left_s = self._free_s + self._config.run.step_floor_s - time.monotonic()
    if left_s > 0:
      self._stop.wait(left_s)

  def _write(self, pending: Dispatched, loss: float, step_s: float):
    if pending.step % self._config.run.log_every_steps and pending.step != 1:
      return
    self._writer.write_scalars(
      pending.step,
      {
        names.TIME: time.time(),
        names.INCARNATION: self._exchange.incarnation,
        names.GLOBAL_STEP: pending.global_step,
        names.TRAIN_LOSS: loss,
        names.LEARNING_RATE: pending.lr,
        names.STEP_TIME: step_s,
        names.STALL_TIME: pending.stall_s,
        names.TOKENS_PER_S: self._device.tokens_per_step / step_s,
        **self._socket_bytes(),
      },
    )

  def _socket_bytes(self) -> dict[str, int]:
    if self._meter is None:
      return {}
    counted = self._meter.sample()
    return {
      names.SOCKET_SENT: counted.sent,
      names.SOCKET_RECEIVED: counted.received,
    }


def stop_on_signals(training: Training):
  """SIGTERM and SIGINT: leave in good order."""
  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, training.stop)
