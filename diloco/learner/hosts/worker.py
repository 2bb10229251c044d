# SPDX-License-Identifier: Apache-2.0
"""A process of a learner that does not lead: the same steps, its own bytes.

Its loop executes the leading host's orders in sequence; a thread reads them,
and two workers move bytes, as in the leading host's `SyncerClient`.
"""

import contextlib
import queue

from diloco.checkpoint.learner_records import LearnerRecords
from diloco.learner import peer_bootstrap
from diloco.learner.device import Device
from diloco.learner.hosts.host_transfer import OF_SESSIONS, HostTransfer
from diloco.learner.replica import Mismatch
from diloco.learner.restore import RestoredState
from diloco.learner.train_state import TrainState
from diloco.protocol import host_messages
from diloco.run import payload_parts
from diloco.run.spec import RunSpec
from diloco.run.threads import Worker
from diloco.transport.data_plane import Closed, DataPlane, TransferFailed
from diloco.transport.host_channel import GroupLost, HostConnection

JOBS_MAX = 256  # Per worker; the leading host waits for what it requested.
LOOK_S = 0.1  # Between two looks whether a save is over.
CLOSE_S = 30.0  # Limit for writing the last checkpoint.
LOOP = (
  host_messages.MakeStep,
  host_messages.TakeSnapshot,
  host_messages.ApplyFragment,
  host_messages.ResetState,
  host_messages.DonateAt,
  host_messages.AdoptState,
  host_messages.BeginAt,
  host_messages.SaveAt,
  host_messages.EndAt,
)


class HostWorker:
  """One of the hosts 1 … N−1.

  Args:
    device: the compiled device.
    restored: what the process starts from; it is consumed.
    records: takes this host's checkpoints.
    plane: the data plane.
    connection: to the leading host; its messages go to `hear`, its end to
      `lost`.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    learner: int,
    device: Device,
    restored: RestoredState,
    records: LearnerRecords,
    plane: DataPlane,
    connection: HostConnection,
  ):
    self._state = TrainState(run_spec, learner, device, restored, records)
    self._records = records
    self._transfer = HostTransfer(run_spec, device, restored.host, plane)
    self._codec = self._transfer.codec
    self._donations = self._transfer.donations
    self._todo: queue.SimpleQueue = queue.SimpleQueue()
    self._sessions = self._transfer.sessions
    self._fetched: (
      tuple[host_messages.HostFetch, peer_bootstrap.FetchedState] | None
    )
    self._fetched = None  # From a donor; for the worker 'down'.
    self._up = Worker('up', JOBS_MAX, self._todo.put)
    self._down = Worker('down', JOBS_MAX, self._todo.put)
    self._connection = connection
    self._saving_step = 0  # Of the save in progress.

  def run(self) -> host_messages.EndAt:
    """Executes orders until it is told to end.

    Raises:
      GroupLost: the leading host is gone.
    """
    while True:
      said = self._next()
      if isinstance(said, BaseException):
        raise said
      if isinstance(said, host_messages.EndAt):
        self._records.close(CLOSE_S)
        return said
      self._do(said)

  def close(self):
    """Ends threads and sessions."""
    self._up.close(1.0)
    self._down.close(1.0)
    self._donations.end_all()
    self._sessions.close()

  def lost(self, error: GroupLost):
    """Reports the end of the connection to the loop."""
    self._todo.put(error)

  # On the reading thread ------------------------------------------------------

  def hear(self, message):
    """Handles a message of the leading host."""
    if isinstance(message, LOOP):
      self._todo.put(message)
      return
    match message:
      case host_messages.OpenSession():
        addresses = self._sessions.open(message.session)
        self._say(host_messages.SessionAt(message.session, addresses))
      case _ if isinstance(message, OF_SESSIONS):
        self._sessions.perform(message)
      case host_messages.OfferHeld():
        p = message.fragment
        self._offer(message, lambda: self._codec.encode_held(p))
      case host_messages.HostTake():
        self._submit(self._down, lambda: self._take(message))
      case host_messages.HostFetch():
        self._submit(self._down, lambda: self._fetch(message))
      case host_messages.FetchOver():
        self._submit(self._down, lambda: self._end_fetch(message.taken))
      case host_messages.HostDonationOver():
        newcomer = message.learner, message.incarnation
        self._submit(self._up, lambda: self._donations.end(newcomer))
      case host_messages.HostDonationsOver():
        self._submit(self._up, self._donations.end_all)
      case _:
        raise TypeError(f'Not for another host: {message!r}.')

  def _say(self, message):
    self._connection.send(message)

  def _submit(self, worker: Worker, job):
    if not worker.submit(job):
      self._todo.put(RuntimeError('a worker has no room'))

  # On the workers -------------------------------------------------------------

  def _offer(self, order, encode):
    """Offers this host's parts; reports success or failure."""

    def job():
      shares = encode()
      said = tuple(payload_parts.part_of(data) for data in shares)
      try:
        self._sessions.offer(
          order.session, order.fragment, order.handle, shares
        )
      except Closed:
        said = ()
      self._say(host_messages.HostOffered(order.handle, said))

    self._submit(self._up, job)

  def _take(self, order: host_messages.HostTake):
    reason = ''
    try:
      self._transfer.take(order)
    except (TransferFailed, Mismatch) as error:
      reason = f'{type(error).__name__}: {error}'
    self._say(host_messages.HostTook(order.fragment, order.version, reason))

  def _fetch(self, order: host_messages.HostFetch):
    self._fetched, reason = None, ''
    try:
      self._fetched = order, self._transfer.fetch(order)
    except (TransferFailed, Mismatch) as error:
      reason = f'{type(error).__name__}: {error}'
    self._say(host_messages.HostFetched(reason))

  def _end_fetch(self, taken: bool):
    """Ends a fetch on all hosts together; adopts it before reporting it."""
    fetched, self._fetched = self._fetched, None
    if taken:
      self._transfer.adopt(*fetched)
      self._say(host_messages.HostAdopted())

  # On the loop ----------------------------------------------------------------

  def _next(self):
    """Waits for an order; meanwhile reports the end of a save."""
    while self._saving_step:
      if not self._records.saving:
        self._say(host_messages.HostSaved(self._saving_step))
        self._saving_step = 0
        break
      with contextlib.suppress(queue.Empty):
        return self._todo.get(timeout=LOOK_S)
    return self._todo.get()

  def _do(self, said):
    match said:
      case host_messages.TakeSnapshot():
        self._snapshot(said)
      case host_messages.DonateAt():
        self._donate(said)
      case host_messages.ApplyFragment():
        arrived = self._transfer.take_arrived(said.fragment, said.version)
        assert arrived is not None, f'{said} has not arrived here'
        self._state.perform(said, arrived)
      case host_messages.AdoptState():
        self._state.perform(said, self._transfer.take_adopted())
      case host_messages.SaveAt():
        self._state.perform(said)
        self._saving_step = said.step
      case _:
        self._state.perform(said)

  def _snapshot(self, said: host_messages.TakeSnapshot):
    p, theta = said.fragment, self._state.perform(said)
    if said.session:
      reference = self._state.own.reference(p)
      self._offer(said, lambda: self._codec.encode_delta(p, theta, reference))

  def _donate(self, said: host_messages.DonateAt):
    state = self._state.perform(said)
    thetas = [each.theta for each in self._state.held]
    newcomer = said.learner, said.incarnation

    def job():
      try:
        offered = self._donations.offer(
          newcomer, said.handles, thetas, state.inner_state
        )
      except Closed:
        offered = peer_bootstrap.OfferedState('', ())
      finally:
        state.release()
      self._say(
        host_messages.HostDonated(*newcomer, offered.address, offered.parts)
      )

    self._submit(self._up, job)
