# SPDX-License-Identifier: Apache-2.0
"""A learner's connection to the syncer, restored whenever it is lost."""

import dataclasses
import queue
import threading
import time
from collections.abc import Callable

from absl import logging

from diloco.protocol import messages
from diloco.protocol.incarnation import incarnation_of, process_after
from diloco.transport.auth import OPEN, Access
from diloco.transport.control_client import (
  ConnectFailed,
  ControlClient,
  NotAdmitted,
)
from diloco.transport.data_plane import DataPlane
from diloco.transport.sockets import HostUnknown

ATTEMPT_S = 2.0  # For one attempt to connect.
RETRY_S = (0.1, 0.5)  # Pause between attempts: the first, and the longest.
TELL_EVERY_S = 5.0  # Interval of the log line that there is no syncer.
INQUIRE_S = 10.0  # For an inquiry to be heard, and for its answer.
RISES_MAX = 8  # For a process overtaken by others before it is admitted.


class SyncerAbsent(Exception):
  """No syncer was found in the time that the configuration allows."""


class RunIsOver(Exception):
  """The syncer has ended and left its results."""


@dataclasses.dataclass(frozen=True)
class SyncerSession:
  """One connection to the syncer, under a number of its own."""

  incarnation: int
  client: ControlClient


@dataclasses.dataclass(frozen=True)
class SyncerAddress:
  """The address of a run's syncer, and the way that bytes take to it.

  Attributes:
    address: the syncer's host:port.
    plane: makes the publishers of each session.
    access: credentials to present to the syncer and to require of it.
    is_over: returns True once the run's results exist, if that can be seen.
  """

  address: str
  plane: DataPlane
  access: Access = OPEN
  is_over: Callable[[], bool] = lambda: False


class SyncerConnection:
  """A thread that keeps a session open and wakes up at deadlines.

  Args:
    first_s: time limit of the first connection; later ones have none.
    client: a `SyncerClient`, whose methods `on_…`, `deadline` and, with the
      error that ended it, `crash` the thread calls.

  Attributes:
    process: this process's number; see `protocol.incarnation`.
  """

  def __init__(self, syncer: SyncerAddress, first_s: float, client):
    self._syncer = syncer
    self._first_s = first_s
    self._client = client
    self._sessions = 0
    self._rises: int | None = RISES_MAX
    self.process = time.time_ns() // 1_000_000
    self._closing = threading.Event()
    self._wakes: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    self._thread = threading.Thread(target=self._run, name='link', daemon=True)

  def open(self):
    self._thread.start()

  def wake(self):
    """Wakes the thread, as the deadline has changed."""
    self._wakes.put(None)

  def let_in(self):
    """Notes the admission: any newer process has taken this one's place."""
    self._rises = None

  def rise(self, newest: int) -> bool:
    """Takes a process number above the one that caused the refusal.

    This process's clock may have been set back since that one started. The next
    session uses the new number.

    Returns:
      False if this process was admitted before, or has risen too often.
    """
    if newest < 0 or not self._rises:
      return False
    self._rises -= 1
    self.process = max(self.process, process_after(newest))
    logging.warning('a newer process is known: this is now %d', self.process)
    return True

  def leave(self):
    """Makes the open session the last one."""
    self._closing.set()

  def close(self, timeout_s: float):
    """Sends what is queued, then ends."""
    self._closing.set()
    self._wakes.put('closed here')
    if self._thread.ident is not None:  # It was opened.
      self._thread.join(timeout_s)

  def _run(self):
    try:
      while not self._closing.is_set():
        session = self._connect()
        if session is not None:
          self._hold(session)
    except BaseException as error:  # noqa: BLE001 - handed on, not hidden.
      self._client.crash(error)

  def _connect(self) -> SyncerSession | None:
    """Connects, with retries; returns None if it was closed meanwhile."""
    pause_s, longest_s = RETRY_S
    give_up = time.monotonic() + self._first_s
    tell_s = time.monotonic() + TELL_EVERY_S
    while not self._closing.is_set():
      client = ControlClient(
        self._syncer.address,
        self._client.on_message,
        lambda reason: self._wakes.put(reason),
        access=self._syncer.access,
      )
      try:
        client.connect(ATTEMPT_S)
      except (ConnectFailed, HostUnknown) as error:
        # A known name may be gone for as long as the syncer is.
        hopeless = isinstance(error, HostUnknown | NotAdmitted)
        if hopeless and not self._sessions:
          raise
        if self._syncer.is_over():
          raise RunIsOver('the run is over') from error
        if not self._sessions and time.monotonic() >= give_up:
          raise SyncerAbsent(
            f'no syncer at {self._syncer.address} within {self._first_s} s: '
            f'{error}'
          ) from error
        due_s = self._client.deadline()
        if due_s is not None and time.monotonic() >= due_s:
          self._client.on_deadline()
        if time.monotonic() >= tell_s:
          tell_s += TELL_EVERY_S
          logging.info('still no syncer at %s: %s', self._syncer.address, error)
        self._closing.wait(pause_s)
        pause_s = min(2 * pause_s, longest_s)
        continue
      self._sessions += 1
      incarnation = incarnation_of(self.process, self._sessions)
      return SyncerSession(incarnation, client)
    return None

  def _hold(self, session: SyncerSession):
    """Runs a session to its end; wakes up at deadlines meanwhile."""
    self._client.on_open(session)
    reason = None
    while reason is None:
      deadline = self._client.deadline()
      try:
        left_s = (
          None if deadline is None else max(0.0, deadline - time.monotonic())
        )
        reason = self._wakes.get(timeout=left_s)
      except queue.Empty:
        self._client.on_deadline()
    session.client.close()  # After what is queued.
    logging.info('the session ended: %s', reason)
    self._client.on_close(reason)


def why_refused(
  address: str, access: Access, inquiry: messages.Inquiry
) -> str | None:
  """Asks the syncer why it would refuse this learner's hello for good.

  Returns:
    The reason; None if there is none, or if no syncer is there yet: then the
    hello itself decides.

  Raises:
    NotAdmitted: the syncer requires another token.
  """
  answers: queue.SimpleQueue = queue.SimpleQueue()
  client = ControlClient(address, answers.put, answers.put, access=access)
  try:
    client.connect(INQUIRE_S)  # At once, if nobody listens.
    client.send(inquiry)
    answer = answers.get(timeout=INQUIRE_S)
  except NotAdmitted:
    raise
  except (ConnectFailed, HostUnknown, queue.Empty) as error:
    why = error or f'no answer in {INQUIRE_S:g} s'
    logging.info(
      'no syncer at %s yet (%s): programs are compiled meanwhile', address, why
    )
    return None
  finally:
    client.close()
  return answer.reason if isinstance(answer, messages.Refusal) else None
