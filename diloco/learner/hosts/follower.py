# SPDX-License-Identifier: Apache-2.0
"""A process of a learner that does not lead: the same steps, its own bytes.

Its loop executes the leading host's orders in sequence; a thread reads them,
and two workers move bytes, as in the leading host's `SyncerClient`.
"""

import queue
import threading
from collections.abc import Callable

from diloco.checkpoint.learner_records import LearnerRecords
from diloco.learner.exchange_programs import ExchangePrograms
from diloco.learner.hosts.boundary_memory import BoundaryMemory
from diloco.learner.hosts.host_transfer import OF_SESSIONS, HostTransfer
from diloco.learner.replica import Mismatch
from diloco.learner.restore import RestoredState, restore, started_with
from diloco.learner.train_loop import Reformed
from diloco.learner.train_state import TrainState
from diloco.metrics.workdir import Workdir
from diloco.protocol import host_messages, messages
from diloco.run.spec import RunSpec
from diloco.run.threads import Worker
from diloco.transport.data_plane import DataPlane, TransferFailed
from diloco.transport.host_channel import GroupLost, HostConnection

JOBS_MAX = 256  # Per worker; the leading host waits for what it requested.
CLOSE_S = 30.0  # Limit for writing the last checkpoint.
# Addresses and parts, as in `HostDone`; None: there are none to tell.
Done = tuple[tuple[str, ...], tuple[messages.Part, ...]] | None


class Follower:
  """One of the hosts 1 … N−1: it follows the leading host to the end.

  Args:
    index: of this host, in JAX.
    leading: the connection to the leading host.
    programs: those of this process.
    records: checkpoints of this host.
    plane: the data plane.
    workdir: of the run.
    make_state: takes what was restored, and returns what performs orders.
    memory: of a learner with several slices.

  Attributes:
    state: performs the orders on the arrays of this host.
    on_lost: called on a thread if the leading host is gone, unless it has said
      that the learner ends.

  Raises:
    GroupLost: the leading host is gone.
  """

  def __init__(
    self,
    index: int,
    leading: HostConnection,
    run_spec: RunSpec,
    programs: ExchangePrograms,
    records: LearnerRecords,
    plane: DataPlane,
    workdir: Workdir,
    make_state: Callable[[RestoredState], TrainState],
    memory: BoundaryMemory | None = None,
  ):
    self._records = records
    records.on_over = lambda step: self._say(host_messages.HostSaved(step))
    self._todo: queue.SimpleQueue = queue.SimpleQueue()  # Orders, or an error.
    self._ready = threading.Event()
    self._up = Worker('up', JOBS_MAX, self._todo.put)
    self._down = Worker('down', JOBS_MAX, self._todo.put)
    self._connection = leading
    self.on_lost: Callable[[GroupLost], None] = self._todo.put
    self._told_to_end = False
    leading.on_message, leading.on_lost = self._hear, self._lost
    started, stored = started_with(index, records, memory)
    self._say(started)
    restored = restore(run_spec, programs, records, self._next(), stored)
    self.state = make_state(restored)
    self._transfer = HostTransfer(
      run_spec, programs, restored.host, plane, workdir
    )
    self._ready.set()

  def stop(self, *_):
    """Asks the leading host to end the learner in good order; signal-safe."""
    threading.Thread(
      target=lambda: self._say(host_messages.StopWanted()), daemon=True
    ).start()

  def run(self) -> host_messages.EndAt:
    """Executes orders until it is told to end.

    Raises:
      GroupLost: the leading host is gone.
    """
    try:
      while isinstance(order := self.until_step(), host_messages.MakeStep):
        self._do(order)
      return order
    finally:
      self.close()

  def until_step(
    self,
  ) -> host_messages.MakeStep | host_messages.Proceed | host_messages.EndAt:
    """Executes orders up to the next step, or the end; returns that order.

    Raises:
      GroupLost: the leading host is gone.
    """
    steps = host_messages.MakeStep, host_messages.Proceed, host_messages.EndAt
    while not isinstance(order := self._next(), steps):
      self._do(order)
    if isinstance(order, host_messages.EndAt):
      self._records.close(CLOSE_S)
    return order

  def close(self):
    """Ends the threads and the connection; sends what is queued."""
    self._up.close(1.0)
    self._down.close(1.0)
    self._transfer.end_donations()
    self._transfer.sessions.close()
    self._connection.close(1.0)

  def _say(self, message):
    self._connection.send(message)

  # On the reading thread ------------------------------------------------------

  def _hear(self, message):
    if isinstance(message, host_messages.RestoreFrom):
      self._todo.put(message)
      return
    self._ready.wait()
    transfer, down = self._transfer, self._down
    match message:
      case host_messages.OpenSession():
        addresses = transfer.sessions.open(message.session)
        self._say(host_messages.HostDone(message.job, addresses=addresses))
      case _ if isinstance(message, OF_SESSIONS):
        transfer.sessions.perform(message)
      case host_messages.OfferHeld():
        p = message.fragment
        self._offer(message, lambda: transfer.encode_held(p))
      case host_messages.HostTake():
        self._answer(down, message.job, lambda: transfer.take(message))
      case host_messages.HostFetch():
        self._answer(down, message.job, lambda: transfer.fetch(message))
      case host_messages.ReadSaved():
        self._answer(down, message.job, lambda: transfer.read(message))
      case host_messages.FetchOver():
        end = lambda: transfer.end_fetch(message.taken)  # noqa: E731
        self._answer(down, message.job, end, reports=message.taken)
      case host_messages.EndDonations():
        self._submit(self._up, lambda: transfer.end_donations(message.newcomer))
      case _:  # The loop executes it, in order.
        self._told_to_end |= isinstance(message, host_messages.EndAt)
        self._todo.put(message)

  def _lost(self, error: GroupLost):
    (self._todo.put if self._told_to_end else self.on_lost)(error)

  def _submit(self, worker: Worker, job: Callable[[], None]):
    if not worker.submit(job):
      self._todo.put(RuntimeError('a worker has no room'))

  def _answer(
    self,
    worker: Worker,
    job: int,
    perform: Callable[[], Done],
    reports: bool = True,
  ):
    """Performs on a worker, and reports what is on offer or why it failed."""

    def run():
      try:
        done = host_messages.HostDone(job, '', *(perform() or ()))
      except (TransferFailed, Mismatch) as error:
        reason = f'{type(error).__name__}: {error}'
        done = host_messages.HostDone(job, reason)
      if reports:
        self._say(done)

    self._submit(worker, run)

  def _offer(self, order, encode):
    """Offers this host's parts."""

    def perform() -> Done:
      to = order.session, order.fragment, order.handle
      return (), self._transfer.sessions.offer(*to, encode())

    self._answer(self._up, order.handle, perform)

  # On the loop ----------------------------------------------------------------

  def _next(self):
    order = self._todo.get()
    if isinstance(order, BaseException):
      raise order
    return order

  def _do(self, order):
    argument = None
    match order:
      case host_messages.ApplyFragment():
        argument = self._transfer.take_arrived(order.fragment, order.version)
        assert argument is not None, f'{order} has not arrived here'
      case host_messages.AdoptState():
        argument = self._transfer.take_adopted()
    result = self.state.perform(order, argument)
    match order:
      case host_messages.Reform():
        self._say(host_messages.HostDone(order.job))
        raise Reformed
      case host_messages.TakeSnapshot() if order.session:
        p, encode = order.fragment, self._transfer.encode_delta
        reference = self.state.own.reference(p)
        self._offer(order, lambda: encode(p, result, reference))
      case host_messages.DonateAt():
        self._donate(order, result)
      case host_messages.SaveAt():
        assert result, f'{order} does not begin here: the others would wait'

  def _donate(self, order: host_messages.DonateAt, state):
    held = list(self.state.held)

    def perform() -> Done:
      address, parts = self._transfer.donate(order, held, state)
      return (address,), parts

    self._answer(self._up, order.handles[0], perform)
