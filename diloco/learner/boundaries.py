# SPDX-License-Identifier: Apache-2.0
"""The boundaries between a learner's steps, whoever makes these.

The order within a step matters, and is tested. With τ > 0, for each n:

1. step n is dispatched, while the devices are computing step n − 1;
2. wait for step n − 1 to complete, and report it;
3. boundary n, while the devices compute step n: blend in what has arrived
   (after step n), copy what is due (available once step n is done).

So the devices always have the next step queued, for as long as a boundary takes
no longer than a step; the part of the host's time that delays them is `stall_s`
of step n. A copy made at boundary n can be offered when step n is done, which
is when the loop is at boundary n + 1: its update is taken in at boundary n + 2
if the round trip (merge included) takes less than a step, one later for each
further step. Two is the least: to have it at boundary n + 1, the loop would
have to hold step n + 2 back until the update is there, or step n + 1 is nearly
done. With the boundary before the wait it would be three.

With τ = 0 the boundary of a step at which something is offered waits for that
step, and for the update.
"""

import dataclasses
import json
import math
import sys
import threading
import time

import jax
import numpy as np
from absl import logging

from diloco.checkpoint.learner_records import LearnerRecords
from diloco.learner import syncer_client
from diloco.learner.hosts.host_group import HostGroup
from diloco.learner.restore import RestoredState, progress_of
from diloco.learner.train_state import TrainState
from diloco.metrics import names
from diloco.metrics.writer import Writer
from diloco.protocol import host_messages, messages
from diloco.protocol.learner import events as learner_events
from diloco.run.event_log import SEED, LearnerEventLog
from diloco.run.spec import RunSpec
from diloco.transport.sockets import SocketMeter

CLOSE_S = 30.0  # Limit for writing the last checkpoint.


@dataclasses.dataclass(frozen=True)
class DispatchedStep:
  """An inner step that was dispatched, and whose metrics are not read yet."""

  step: int  # Own step; 1 is the first from the seed.
  tokens: int  # Of all steps, with its own.
  step_tokens: int  # Its own.
  metrics: dict[str, jax.Array]
  rows: int  # Taken of the data shard, with its own.
  global_step: int
  lr: float | None
  stall_s: float


class Boundaries:
  """The boundaries between one learner's steps, on its leading host.

  Args:
    learner: the learner id.
    state: performs it on the arrays of this host.
    restored: what the process starts from.
    client: of the syncer; not yet open.
    records: takes checkpoints.
    writer: takes metrics.
    event log: takes events.
    notice_s: how long leaving in good order may take.
    hosts: the learner's other hosts: they are told each action before it is
      performed here.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    learner: int,
    state: TrainState,
    restored: RestoredState,
    client: syncer_client.SyncerClient,
    records: LearnerRecords,
    writer: Writer,
    tape: LearnerEventLog,
    notice_s: float,
    hosts: HostGroup | None = None,
  ):
    config = run_spec.config
    self._config = config
    self._client = client
    self._records = records
    self._writer = writer
    self._tape = tape
    self._notice_s = notice_s
    self._hosts = hosts or HostGroup()
    self._state = state
    self._training = False
    self._source = restored.source
    self._rows = 0
    self._step_tokens = 0  # Of the last step.
    self._save_due = False
    checkpoint, learners = config.checkpoint, config.protocol.learners
    self._save_every_steps = checkpoint.learner_every_steps
    # By turns: learners that write at once take each other's disk and cores.
    self._save_phase = learner % learners * self._save_every_steps // learners
    self._saving_step = self._saved_step = 0
    self._step = restored.start.step
    self._tokens = restored.start.tokens  # Of all steps so far.
    tape.at(self._step, self._tokens)
    self._loss: float | None = None  # Of the last step that was read.
    self._pending: DispatchedStep | None = None
    self._reported_s = 0.0
    self._waited_s = 0.0
    self._free_s = 0.0  # When the step in flight could start to compute.
    self._left: learner_events.Leave | None = None
    self._stop = threading.Event()
    self._stopping = False
    self._meter = SocketMeter() if sys.platform == 'linux' else None

  def stop(self, *_):
    """Leaves in good order, from the next boundary on; signal-safe."""
    self._stop.set()
    self._client.interrupt()

  @property
  def rows(self) -> int:
    """Taken of the data shard."""
    return self._rows

  @property
  def step(self) -> int:
    """Own step; 1 is the first from the seed."""
    return self._step

  def begin(self) -> bool:
    """Connects, and waits until the learner may train, with a state to start
    from; returns False if it left instead.
    """
    self._client.open()
    while not self._training and self._goes_on():
      self._perform_next(wait=True)
    self._reported_s = self._free_s = time.monotonic()
    return self._training

  def finish(self) -> learner_events.Leave:
    """Reports the last step, and leaves."""
    self._report()
    if self._stopping:
      self._save_last()
    while self._goes_on():
      self._perform_next(wait=True)
    self._records.close(CLOSE_S)
    return self._left

  def abandon(self, reason: str):
    """Leaves between two boundaries, with a checkpoint of the last one."""
    self._report()
    self._save_last()
    self._client.leave(reason)
    self._left = learner_events.Leave(reason)
    self._records.close(CLOSE_S)

  def goes_on(self) -> bool:
    """Returns whether to make another step; False: see `finish`."""
    return self._training and self._goes_on()

  def _goes_on(self) -> bool:
    if self._stop.is_set() and not self._stopping:
      self._stopping = True
      self._client.handle(learner_events.Stop(self._notice_s))
    return self._left is None

  def after_step(
    self,
    metrics: dict[str, jax.Array],
    rows: int,
    tokens: int,
    global_step: int,
    lr: float | None = None,
  ):
    """Performs the boundary after a step that was dispatched.

    Args:
      metrics: f32 scalars of the step, which is not waited for; 'loss' is one.
      rows: that it took of the data shard.
      tokens: that it trained on.
      global_step: t as it was dispatched.
      lr: its learning rate, if known.
    """
    self._step += 1
    self._rows += rows
    self._tokens += tokens
    self._step_tokens = tokens
    self._tape.at(self._step, self._tokens)
    done = DispatchedStep(
      self._step,
      self._tokens,
      tokens,
      metrics,
      self._rows,
      global_step,
      lr,
      self._waited_s,
    )
    self._waited_s = 0.0
    if self._config.protocol.overlap_steps and not self._stopping:
      self._report()
      stall_s = done.stall_s + self._boundary()
      self._pending = dataclasses.replace(done, stall_s=stall_s)
      if self._client.waiting:  # At the end of the run, for its syncer.
        self._wait_at_boundary()
    else:
      self._synchronous(done)
    self._waited_s += self._save_if_due()

  def _boundary(self) -> float:
    """Performs a boundary between two steps; returns its seconds."""
    began_s = time.monotonic()
    self._client.handle(learner_events.Boundary(self._step_tokens))
    while self._perform_next(wait=False):
      pass
    return time.monotonic() - began_s

  def _synchronous(self, done: DispatchedStep):
    """Reports a step before its offers (at τ = 0, or its last), and waits.

    A learner that has offered makes no step: the syncer counts the offer as the
    step if that is all it has, and a later report as one step too many.
    """
    self._report()
    self._pending = done
    if self._stopping:  # It may leave at this boundary, and its session ends.
      self._report()
    self._boundary()
    self._wait_at_boundary()

  def _wait_at_boundary(self):
    began_s = time.monotonic()
    while self._client.waiting and self._goes_on():
      self._perform_next(wait=True)
    while self._perform_next(wait=False):
      pass
    self._free_s = time.monotonic()
    # It counts as a stall of the next step.
    self._waited_s = self._free_s - began_s

  def _perform_next(self, wait: bool) -> bool:
    effect = self._client.next_boundary(wait)
    match effect:
      case None:
        return False
      case syncer_client.INTERRUPT:
        pass
      case learner_events.Snapshot():
        self._snapshot(effect)
      case learner_events.Apply():
        self._apply(effect)
      case learner_events.HandIn():
        self._client.say_after_offers(messages.HandedIn(effect.last_round))
      case learner_events.SayLeaving():
        self._client.say_after_offers(messages.Leaving())
      case learner_events.DonateState():
        self._donate(effect)
      case learner_events.Adopt():
        inner_state, self._source = self._client.take_adopted()
        self._do(host_messages.AdoptState(), inner_state)
      case learner_events.Draw():
        self._do(host_messages.DrawTheta())
        self._client.handle(learner_events.Drawn(self._state.host.crcs()))
      case learner_events.Reset():
        self._do(host_messages.ResetState())
        self._source = SEED
      case learner_events.Begin():
        self._do(host_messages.BeginAt(effect.rows))
        self._tape.begin(effect.rows, self._source)
        self._rows = effect.rows
        self._training = True
      case learner_events.Save():
        self._save_last()
      case learner_events.Cease():
        self._tape.cease()
        self._training = False
      case learner_events.Leave():
        self._tape.leave(effect.reason)
        self._left = effect
      case _:
        raise TypeError(f'Not for the loop: {effect!r}.')
    return True

  def _snapshot(self, effect: learner_events.Snapshot):
    prepared = self._client.prepare_offer(effect)
    session = prepared.incarnation if prepared else 0
    p, handle, keep = effect.fragment, effect.handle, effect.keep
    order = host_messages.TakeSnapshot(p, session, handle, keep)
    theta = self._do(order)
    self._tape.snapshot(effect)
    if self._config.protocol.overlap_steps == 0:
      self._report()
    if prepared is not None:
      reference = self._state.own.reference(p)
      self._client.offer(prepared, effect, theta, reference)

  def _donate(self, effect: learner_events.DonateState):
    """Holds the inner state of this boundary, on all hosts, for a newcomer."""
    handles = self._client.donation_handles(effect.partition)
    order = host_messages.DonateAt(
      effect.learner, effect.incarnation, handles, effect.partition
    )
    self._tape.save()
    state = self._do(order)
    self._client.donate(order, effect.step, list(self._state.held), state)

  def _apply(self, effect: learner_events.Apply):
    p, version = effect.fragment, effect.version
    arrived = self._client.take_arrived(p, version)
    if arrived is None:
      return
    self._tape.apply(effect, arrived.held.crc)
    carry, handle, keep = effect.carry, effect.handle, effect.keep
    order = host_messages.ApplyFragment(
      p, version, self._training, carry, handle, keep
    )
    self._do(order, arrived)

  def _do(self, order, argument=None):
    """Performs here what all other hosts are told to perform."""
    self._hosts.tell(order)
    # A loop that is not ours may forbid transfers that it does not ask for.
    with jax.transfer_guard('allow'):
      return self._state.perform(order, argument)

  def _report(self):
    """Waits for the step before the one just dispatched, and reports it."""
    pending, self._pending = self._pending, None
    if pending is None:
      return
    loss = _read(pending.metrics['loss'])
    if not math.isfinite(loss):
      self._leave_diverged(pending.step, loss)
      return
    self._loss = loss
    self._compute_to_floor()
    now_s = time.monotonic()
    step_s, self._reported_s = now_s - self._reported_s, now_s
    self._free_s = now_s
    self._client.handle(
      learner_events.Completed(
        tokens=pending.step_tokens,
        rows=pending.rows,
        step_s=step_s,
        stall_s=min(pending.stall_s, step_s),
        loss=loss,
        saved_step=self._newest_saved(),
      )
    )
    self._write(pending, loss, step_s)

  def _leave_diverged(self, step: int, loss: float):
    """Leaves: no step mends a diverged θ, but a peer's state can."""
    reason = f'loss {loss} at step {step}'
    self._client.leave(reason)
    self._left = self._left or learner_events.Leave(reason)

  def _save_if_due(self) -> float:
    """Saves a checkpoint every so many steps; returns the seconds it waited.

    It comes a few steps later while a newcomer's donor reads the inner state.
    """
    every_steps = self._save_every_steps
    if not every_steps or not self._training:
      return 0.0
    since = (self._step - self._save_phase) % every_steps
    self._save_due = self._save_due or not since
    if not self._save_due or not (
      self._state.holder.ready or self._records.saving
    ):
      return 0.0
    self._save_due = False
    began_s = time.monotonic()
    self._save()
    return time.monotonic() - began_s

  def _progress(self) -> str:
    """Returns what belongs to this boundary beside its arrays, JSON."""
    return json.dumps(
      progress_of(
        self._client.machine_state(),
        self._rows,
        self._client.process,
        tuple(replica.crc for replica in self._state.held),
      )
    )

  def _save(self):
    """Saves θ at this boundary with all that belongs to it, asynchronously."""
    if self._loss is None or (self._left and not self._left.stopped):
      return
    if not self._records.can_begin(self._step):
      return
    # Each host keeps its newest few checkpoints: a host that is several behind
    # would have none of the same step as the others.
    if not self._hosts.have_saved(self._saving_step):
      logging.warning(
        'step %d is not saved: another host is still saving step %d',
        self._step,
        self._saving_step,
      )
      return
    self._tape.save()
    order = host_messages.SaveAt(self._step, self._progress())
    if self._do(order):
      self._saving_step = self._step

  def _save_last(self):
    """Saves once no host is saving: otherwise it would be skipped."""
    give_up_s = time.monotonic() + self._notice_s
    self._records.wait(self._notice_s)
    self._hosts.wait_until_saved(
      self._saving_step, give_up_s - time.monotonic()
    )
    self._save()

  def _newest_saved(self) -> int:
    """The newest complete checkpoint of this process; 0: none."""
    if self._records.newest_step == self._saving_step:
      self._saved_step = self._saving_step
    return self._saved_step

  def _compute_to_floor(self):
    """Sleeps if `run.step_floor_s` asks for longer steps.

    The sleep simulates devices at work: the boundary's time counts as
    concurrent.
    """
    left_s = self._free_s + self._config.run.step_floor_s - time.monotonic()
    if left_s > 0:
      self._stop.wait(left_s)

  def _write(self, pending: DispatchedStep, loss: float, step_s: float):
    if pending.step % self._config.run.log_every_steps and pending.step != 1:
      return
    self._writer.write_scalars(
      pending.step,
      {
        names.TIME: time.time(),
        names.INCARNATION: self._client.incarnation,
        names.GLOBAL_STEP: pending.global_step,
        names.TRAIN_LOSS: loss,
        **({} if pending.lr is None else {names.LEARNING_RATE: pending.lr}),
        names.STEP_TIME: step_s,
        names.STALL_TIME: pending.stall_s,
        names.TOKENS: pending.tokens,
        names.TOKENS_PER_S: pending.step_tokens / step_s,
        **self._scalars(step_s),
        **{
          name: _read(pending.metrics[metric])
          for metric, name in names.OF_STEP.items()
          if metric in pending.metrics
        },
        **self._socket_bytes(),
      },
    )

  def _scalars(self, step_s: float) -> dict[str, float]:
    """Returns more figures of a step, by name; a subclass may have some."""
    del step_s
    return {}

  def _socket_bytes(self) -> dict[str, int]:
    if self._meter is None:
      return {}
    counted = self._meter.sample()
    return {
      names.SOCKET_SENT: counted.sent,
      names.SOCKET_RECEIVED: counted.received,
    }


def _read(scalar: jax.Array) -> float:
  """Returns the value, once it is there; also under a transfer guard."""
  with jax.transfer_guard_device_to_host('allow'):
    return float(np.asarray(scalar))
