# SPDX-License-Identifier: Apache-2.0
"""Performs the boundaries, and steps, of one host, on its θ and inner state.

It performs the messages of `protocol.host_messages` that are for a loop. The
leading host's train loop has it perform the very messages that it sends to the
other hosts; there `hosts.follower` does.
"""

import json
import threading
from collections.abc import Callable
from typing import Any

import jax

from diloco.checkpoint.learner_records import HeldState, LearnerRecords
from diloco.data import pipeline
from diloco.learner.exchange_programs import ExchangePrograms, Params
from diloco.learner.hosts.boundary_memory import Boundary, BoundaryMemory
from diloco.learner.local_delta import LocalDelta
from diloco.learner.programs import LearnerPrograms
from diloco.learner.replica import ArrivedFragment
from diloco.learner.restore import RestoredState, initial_replicas
from diloco.protocol import host_messages
from diloco.run.spec import RunSpec


class TrainState:
  """θ and all that belongs to it at a boundary, on one host.

  Args:
    programs: those of this process.
    restored: what the process starts from; it is consumed.
    records: takes this host's checkpoints.

  Attributes:
    params: θ, on the devices.
    inner_state: the inner optimizer's state, on the devices.
    host: the host's copy of Θ.
    held: Θ_p as last taken in, by fragment.
    own: what of θ is the learner's own.
    holder: keeps a boundary readable while steps go on.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    programs: ExchangePrograms,
    restored: RestoredState,
    records: LearnerRecords,
  ):
    self._run_spec = run_spec
    self._programs = programs
    self._records = records
    self.params, self.inner_state = restored.params, restored.inner_state
    self.host = restored.host
    self.held = self.host.held()
    self.own = LocalDelta(
      programs,
      run_spec.config.protocol.blend,
      {p: replica.theta for p, replica in enumerate(self.held)},
      None if restored.inner_state is None else self.params,
    )
    self.holder = DoubleBuffer(programs)

  def perform(self, order, argument: Any = None):
    """Performs a message at this boundary.

    Args:
      order: the message.
      argument: the fragment that has arrived, or the donor's inner state, where
        the message is about one.

    Returns:
      The metrics of a step, if it makes them; the copy of a snapshot, whether a
      save has begun, or the state that is held for a newcomer.
    """
    match order:
      case host_messages.TakeSnapshot():
        handle, keep = order.handle, order.keep
        return self.own.snapshot(order.fragment, self.params, handle, keep)
      case host_messages.ApplyFragment():
        self._apply(order, argument)
      case host_messages.DonateAt():
        return self.holder.hold_state(self.inner_state)
      case host_messages.AdoptState():
        self.inner_state = self._programs.put_state(argument)
      case host_messages.DrawTheta():
        self._draw()
      case host_messages.ResetState():
        self.inner_state = self._programs.fresh_state(self.params)
      case host_messages.BeginAt():
        self.holder.begin()
      case host_messages.SaveAt():
        bases = dict(self.own.bases)
        return self._records.save_state(
          order.step,
          self.holder.hold(self.params, self.inner_state),
          lambda: self._programs.bases_to_save(bases),
          json.loads(order.progress),
        )
      case _:
        raise TypeError(f'Not for the loop: {order!r}.')
    return None

  def _draw(self):
    self.params, self.inner_state = self._programs.draw(self.params)
    self.held = initial_replicas(self._run_spec, self._programs, self.params)
    self.own.bases.update((p, x.theta) for p, x in enumerate(self.held))
    self.host.begin(self.held)

  def _apply(self, order: host_messages.ApplyFragment, new: ArrivedFragment):
    """Blends in Θ_p; before the first step there is nothing to blend."""
    p = order.fragment
    self.held[p] = new.held
    self.params = self.own.take_in(
      p,
      self.holder.to_blend(self.params),
      new.held.theta,
      new.device,
      order,
      order.blended,
    )


class SteppingState(TrainState):
  """A `TrainState` that also makes the steps, on batches of its data shard.

  Args:
    learner: the learner id, which selects the data shard.
    programs: those of this process, with the inner step.
    memory: takes each boundary, of a learner with several slices.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    learner: int,
    programs: LearnerPrograms,
    restored: RestoredState,
    records: LearnerRecords,
    memory: BoundaryMemory | None = None,
  ):
    super().__init__(run_spec, programs, restored, records)
    self._learner = learner
    self._memory = memory
    self._release: Callable[[], None] = lambda: None  # Of the last boundary.
    self._copy_every = run_spec.config.checkpoint.slice_copy_every_steps
    self.holder.of_each = memory is not None
    self._dataset = run_spec.dataset(learner)
    self._batches = None  # They are read once training has begun.
    self._rows = 0  # Taken of the data shard.
    self._batch = run_spec.config.data.batch
    if memory is not None and restored.progress:
      # What another slice gave is here, too, before that one may be lost.
      memory.note(
        Boundary(
          restored.source.step,
          self.params,
          self.inner_state,
          dict(self.own.bases),
          restored.progress,
        )
      )

  def perform(self, order, argument: Any = None):
    if isinstance(order, host_messages.MakeStep):
      if self._memory is not None:
        self._note(order.progress)
      return self._step(order)
    if isinstance(order, host_messages.Reform):
      self._note(order.progress, always=True)
      return None
    if isinstance(order, host_messages.BeginAt):
      self._begin(order.rows)
    return super().perform(order, argument)

  def end(self):
    """Ends the threads that read batches, and a trace of steps."""
    if self._batches is not None:
      self._batches.close()
    if self._programs.profiler is not None:
      self._programs.profiler.close()

  def _begin(self, rows: int):
    self._batches = pipeline.batches(
      self._dataset,
      rows,
      self._batch,
      self._run_spec.config.data.threads,
      self._programs.own_rows,
    )
    self._rows = rows

  def _note(self, progress: str, always: bool = False):
    """Keeps this boundary readable while the next step is made.

    That one is dispatched once this boundary has been computed: a step that
    fails for want of a slice takes with it whatever was to be computed from.
    On accelerators, which need a copy for it, it is every so many steps.
    """
    jax.block_until_ready((self.params, self.inner_state))
    step = json.loads(progress)['step']
    copies = not self._programs.double_buffers
    if copies and step % self._copy_every and not always:
      return
    self._release()
    held = self.holder.hold(self.params, self.inner_state)
    self._release = held.release
    self._memory.note(
      Boundary(
        step, held.params, held.inner_state, dict(self.own.bases), progress
      )
    )

  def _step(self, order: host_messages.MakeStep) -> dict[str, jax.Array]:
    assert self._rows == order.rows, f'at {self._rows}, told {order.rows}'
    self._rows += self._batch
    if self._programs.profiler is not None:
      self._programs.profiler.before_step()
    batch, first = next(self._batches), self._programs.own_rows.start
    placed = self._programs.put_batch(batch, first)
    draw = self._learner, order.rows
    self.params, self.inner_state, metrics = self.holder.step(
      self.params, self.inner_state, placed, order.lr, draw
    )
    return metrics


# Keeps θ and the inner state of a boundary readable while training goes on.
#
# An inner step overwrites the arrays that it is given. What is saved, or given
# to a newcomer, is read by other threads, for as long as a disk or a peer
# takes.
#
# On CPU devices there is a second set of buffers, touched as training begins:
# before, what draws or takes over a state needs the memory. The step after a
# boundary that is held writes its results there, and what it was given stays as
# it is; once read, that is the second set. Nothing is copied. A copy would be
# made by the same cores as the step, and memory that was never touched before
# is many times slower to write to.
#
# On accelerators the devices copy what is held before the next step, and the
# copy is freed when it has been read. If they have no room for a copy of θ and
# the inner state, the loop waits until there is one in the host's memory.


class _Shared:
  """Arrays that go back once the loop and all readers are done with them."""

  def __init__(self, arrays, give_back: Callable[[object], None]):
    self.arrays = arrays
    self._give_back = give_back
    self._lock = threading.Lock()
    self._users = 1  # The loop, until the step after the boundary.

  def join(self) -> Callable[[], None]:
    """Adds a reader; returns what ends its use, once."""
    with self._lock:
      self._users += 1
    reading = threading.Lock()

    def leave():
      if reading.acquire(blocking=False):
        self.leave()

    return leave

  def leave(self):
    with self._lock:
      self._users -= 1
      over = not self._users
    if over:
      self._give_back(self.arrays)


class _Spare:
  """One set of buffers that nothing reads, or the room for it."""

  def __init__(self, make: Callable[[], object]):
    self._make = make
    self._lock = threading.Lock()
    self._arrays = None

  def fill(self):
    self.put(jax.block_until_ready(self._make()))

  @property
  def there(self) -> bool:
    return self._arrays is not None

  def put(self, arrays):
    """Keeps the buffers, unless there are some already."""
    with self._lock:
      if self._arrays is None:
        self._arrays = arrays

  def take(self):
    """Returns the buffers; new ones if they are in use."""
    with self._lock:
      arrays, self._arrays = self._arrays, None
    return self._make() if arrays is None else arrays


class DoubleBuffer:
  """Makes the steps of one learner, and holds what others read.

  For the loop's thread; a `HeldState` is released on any.

  Args:
    programs: compiled; several holders may share them.

  Attributes:
    of_each: whether each boundary is held until the next.
  """

  of_each = False

  def __init__(self, programs: ExchangePrograms):
    self._programs = programs
    self._params: _Shared | None = None  # Of this boundary, if held.
    self._state: _Shared | None = None
    self._swaps = programs.double_buffers
    if not self._swaps:
      programs.compile_copy_all()
    else:
      programs.compile_double_buffered()
      self._spare_params = _Spare(lambda: programs.zeros(programs.params_like))
      self._spare_state = _Spare(lambda: programs.zeros(programs.state_like))

  def begin(self):
    """Makes the buffers, if there are any."""
    if self._swaps and not self._spare_params.there:
      self._spare_params.fill()
      self._spare_state.fill()

  @property
  def ready(self) -> bool:
    """True if `hold` needs no memory but what there is."""
    return (
      not self._swaps
      or self.of_each
      or (self._spare_params.there and self._spare_state.there)
    )

  def hold(self, params: Params, state) -> HeldState:
    """Holds θ and the inner state until they are released."""
    if not self._swaps:
      return HeldState(*self._programs.copy_all(params, state))
    self._params = self._params or _Shared(params, self._spare_params.put)
    leave = self._params.join()
    held = self.hold_state(state)

    def release():
      leave()
      held.release()

    return HeldState(params, state, release)

  def hold_state(self, state) -> HeldState:
    """Holds the inner state alone."""
    if not self._swaps:
      return HeldState(None, self._programs.copy_state(state))
    if self._state is None or self._state.arrays is not state:
      self._leave_state()
      self._state = _Shared(state, self._spare_state.put)
    return HeldState(None, state, self._state.join())

  def to_blend(self, params: Params) -> Params:
    """Returns θ for a blend, which overwrites it: a copy if θ is held.

    That is so at the end only: otherwise a step comes after what holds θ.
    """
    if self._params is None:
      return params
    self._params.leave()
    self._params = None
    return self._programs.copy_params(params)

  def step(self, params: Params, state, batch, lr: float, draw):
    """Dispatches an inner step; see `StepPrograms.step`."""
    if self._state is None:
      return self._programs.step(params, state, batch, lr, draw)
    if self._state.arrays is not state:  # A peer's came in its place.
      self.hold_state(state).release()
    spare = self._spare_params.take(), self._spare_state.take()
    results = self._programs.step_double_buffered(
      params, state, batch, lr, draw, spare
    )
    if self._params is None:
      self._spare_params.put(params)
    else:
      self._params.leave()
    self._params = None
    self._leave_state()
    return results

  def _leave_state(self):
    if self._state is not None:
      self._state.leave()
    self._state = None
