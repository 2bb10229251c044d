# SPDX-License-Identifier: Apache-2.0
"""Performs the steps and boundaries of one host, on its θ and inner state.

It performs the messages of `protocol.host_messages` that are for a loop. The
leading host's train loop has it perform the very messages that it sends to the
other hosts; there `hosts.follower` does.
"""

import itertools
import json
from typing import Any

import jax

from diloco.checkpoint.learner_records import LearnerRecords, read_progress
from diloco.data import pipeline
from diloco.learner.device import Device
from diloco.learner.held_state import StateHolder
from diloco.learner.own_progress import OwnProgress
from diloco.learner.replica import ArrivedFragment
from diloco.learner.restore import RestoredState
from diloco.protocol import host_messages
from diloco.run.spec import RunSpec


class TrainState:
  """θ and all that belongs to it at a boundary, on one host.

  Args:
    learner: the learner id, which also selects the data shard.
    device: the compiled device.
    restored: what the process starts from; it is consumed.
    records: takes this host's checkpoints.

  Attributes:
    params: θ, on the devices.
    inner_state: the inner optimizer's state, on the devices.
    held: Θ_p as last taken in, by fragment.
    own: what of θ is the learner's own.
    holder: keeps a boundary readable while steps go on.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    learner: int,
    device: Device,
    restored: RestoredState,
    records: LearnerRecords,
  ):
    self._run_spec = run_spec
    self._learner = learner
    self._device = device
    self._records = records
    self._dataset = run_spec.dataset(learner)
    self._batches = None  # They are read once training has begun.
    self._positions = itertools.count()
    self.params, self.inner_state = restored.params, restored.inner_state
    self.held = restored.host.held()
    self.own = OwnProgress(
      device,
      run_spec.config.protocol.blend,
      {p: each.theta for p, each in enumerate(self.held)},
      self.params,
    )
    self.holder = StateHolder(device)

  def perform(self, said, given: Any = None):
    """Performs a message at this boundary.

    Args:
      said: the message.
      given: the fragment that has arrived, or the donor's inner state, where
        the message is about one.

    Returns:
      The metrics of a step, the copy of a snapshot, whether a save has begun,
      or the state that is held for a newcomer.
    """
    match said:
      case host_messages.MakeStep():
        return self._step(said)
      case host_messages.TakeSnapshot():
        handle, keep = said.handle, said.keep
        return self.own.snapshot(said.fragment, self.params, handle, keep)
      case host_messages.ApplyFragment():
        self._apply(said, given)
      case host_messages.DonateAt():
        return self.holder.hold_state(self.inner_state)
      case host_messages.AdoptState():
        self.inner_state = self._device.put_state(given)
      case host_messages.ResetState():
        self.inner_state = self._device.fresh_state(self.params)
      case host_messages.BeginAt():
        threads = self._run_spec.config.data.threads
        self._batches = pipeline.batches(self._dataset, said.position, threads)
        self._positions = itertools.count(said.position)
      case host_messages.SaveAt():
        return self._records.save(
          said.step,
          self.holder.hold(self.params, self.inner_state),
          self.own.bases,
          read_progress(json.loads(said.progress)),
          said.loss,
        )
      case _:
        raise TypeError(f'Not for the loop: {said!r}.')
    return None

  def end(self):
    """Ends the threads that read batches, and a trace of steps."""
    if self._batches is not None:
      self._batches.close()
    if self._device.profiler is not None:
      self._device.profiler.close()

  def _step(self, said: host_messages.MakeStep) -> dict[str, jax.Array]:
    position = next(self._positions)
    assert position == said.position, f'{position=}, told {said.position}'
    if self._device.profiler is not None:
      self._device.profiler.before_step()
    placed = self._device.put_batch(next(self._batches))
    draw = self._learner, position
    self.params, self.inner_state, metrics = self.holder.step(
      self.params, self.inner_state, placed, said.lr, draw
    )
    return metrics

  def _apply(self, said: host_messages.ApplyFragment, arrived: ArrivedFragment):
    """Blends in Θ_p; before the first step there is nothing to blend."""
    p = said.fragment
    self.held[p] = arrived.held
    self.params = self.own.take_in(
      p,
      self.holder.to_blend(self.params),
      arrived.held.theta,
      arrived.device,
      said,
      said.blended,
    )
