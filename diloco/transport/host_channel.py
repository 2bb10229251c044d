# SPDX-License-Identifier: Apache-2.0
"""Connections between the processes of one learner.

The leading host listens, the others connect; both sides prove that they have
the same secret before a message is read. A broken connection ends the learner:
its hosts fail together. Between the rendezvous of a learner of several slices
and its agents it is the same; there it ends a slice.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import queue
import socket
import threading
import time
from collections.abc import Callable

from diloco.transport import wire

CONNECT_S = 60.0  # Hosts start concurrently, and compile before.
AGAIN_S = 0.2  # Between two attempts while nothing listens yet.
QUEUE_MAX = 4096  # Messages that may wait to be sent to one host.
# A machine that has vanished does not end its connections: the kernel asks
# whether it is there, and waits so long for an answer.
SILENT_S = 30
_ASKED_EVERY_S = 5


class GroupLost(Exception):
  """A host of this learner is gone; the others can't go on without it."""


class HostConnection:
  """A connection to one peer, with a thread that reads and one that writes.

  Args:
    allowed: the kinds of messages that the peer may send.

  Attributes:
    on_message: called with each on the reading thread.
    on_lost: called once with why the connection ended.
  """

  def __init__(
    self,
    connection: multiprocessing.connection.Connection,
    allowed: tuple[type, ...],
    on_message: Callable[[object], None],
    on_lost: Callable[[GroupLost], None],
    peer: str,
  ):
    _notice_silence(connection)
    self._connection = connection
    self._allowed = allowed
    self.on_message = on_message
    self.on_lost = on_lost
    self._peer = peer
    self._closed = threading.Event()
    self._lost = threading.Lock()
    self._queue: queue.Queue[bytes | None] = queue.Queue(QUEUE_MAX)
    self._threads = [
      threading.Thread(target=job, name=f'group {peer}', daemon=True)
      for job in (self._read, self._write)
    ]
    for thread in self._threads:
      thread.start()

  def send(self, message) -> None:
    """Queues a message; messages arrive in order.

    Raises:
      GroupLost: the peer does not read any more.
    """
    try:
      self._queue.put_nowait(wire.encode(message))
    except queue.Full:
      raise GroupLost(f'{self._peer} does not read') from None

  def close(self, timeout_s: float) -> None:
    """Sends what is queued, then ends; a peer that reads loses no message."""
    self._closed.set()
    with contextlib.suppress(queue.Full):  # Who does not read is cut off.
      self._queue.put_nowait(None)
    reader, writer = self._threads
    writer.join(timeout_s)
    # If closed while a thread reads, its descriptor number might be reused.
    with (
      contextlib.suppress(OSError),
      socket.socket(fileno=os.dup(self._connection.fileno())) as same,
    ):
      same.shutdown(socket.SHUT_RDWR)
    reader.join(timeout_s)
    self._connection.close()

  def _read(self):
    try:
      while True:
        data = self._connection.recv_bytes(wire.MESSAGE_BYTES_MAX)
        self.on_message(wire.decode(data, self._allowed, self._peer))
    except (EOFError, OSError) as error:
      self._say_lost(str(error) or type(error).__name__)
    except wire.MalformedMessage as error:
      self._say_lost(str(error))

  def _write(self):
    try:
      while (data := self._queue.get()) is not None:
        self._connection.send_bytes(data)
    except (BrokenPipeError, OSError) as error:
      self._say_lost(str(error) or type(error).__name__)

  def _say_lost(self, reason: str):
    if self._lost.acquire(blocking=False) and not self._closed.is_set():
      self.on_lost(GroupLost(f'{self._peer}: {reason}'))


class HostListener:
  """The listener of the leading host for the others.

  Each connection is greeted on a thread of its own, so that one that is silent,
  or goes away, delays no other.

  Attributes:
    peers: connections that have proven the secret; `accept` takes from there.

  Args:
    host: IP literal of the interface that the others reach.
    secret: the secret that they must have, too.
    port: 0 for any free one.

  Raises:
    OSError: the address is not of this machine, or is taken.
  """

  def __init__(self, host: str, secret: bytes, port: int = 0):
    self._secret = secret
    self._closed = threading.Event()
    self._refused = 0  # Peers that failed the authentication.
    self.peers: queue.SimpleQueue = queue.SimpleQueue()
    self._listener = multiprocessing.connection.Listener(
      (host, port), family='AF_INET', backlog=64
    )
    self._listening = threading.Thread(target=self._listen, daemon=True)
    self._listening.start()

  @property
  def address(self) -> tuple[str, int]:
    return self._listener.address

  def accept(
    self, count: int, timeout_s: float = CONNECT_S
  ) -> list[multiprocessing.connection.Connection]:
    """Waits for `count` peers that prove the secret.

    Raises:
      GroupLost: too few came in time.
    """
    give_up_s = time.monotonic() + timeout_s
    try:
      return [
        self.peers.get(timeout=max(0.0, give_up_s - time.monotonic()))
        for _ in range(count)
      ]
    except queue.Empty:
      raise GroupLost(
        f'a host of this learner did not connect in {timeout_s:g} s; '
        f'{self._refused} that came did not show its secret'
      ) from None

  def close(self) -> None:
    """Accepts no further connections."""
    self._closed.set()
    # Wakes the thread. While it is in accept on a descriptor that is closed the
    # kernel still lets in who comes, to reset it.
    with contextlib.suppress(OSError):
      socket.create_connection(self.address, timeout=1.0).close()
      self._listening.join()
    self._listener.close()

  def _listen(self):
    while not self._closed.is_set():
      try:
        connection = self._listener.accept()
      except OSError:
        continue  # The peer has gone already, or this listener is closed.
      threading.Thread(
        target=self._greet, args=[connection], daemon=True
      ).start()

  def _greet(self, connection):
    try:
      multiprocessing.connection.deliver_challenge(connection, self._secret)
      multiprocessing.connection.answer_challenge(connection, self._secret)
    except (OSError, EOFError, multiprocessing.AuthenticationError):
      self._refused += 1
      connection.close()  # It is not a host of this learner.
      return
    self.peers.put(connection)


def _notice_silence(connection: multiprocessing.connection.Connection) -> None:
  """Has a connection end whose other machine is silent, where TCP can."""
  with socket.socket(fileno=os.dup(connection.fileno())) as same:
    if same.family != socket.AF_INET or not hasattr(socket, 'TCP_USER_TIMEOUT'):
      return
    same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
      (socket.TCP_KEEPIDLE, _ASKED_EVERY_S),
      (socket.TCP_KEEPINTVL, _ASKED_EVERY_S),
      (socket.TCP_KEEPCNT, SILENT_S // _ASKED_EVERY_S),
      (socket.TCP_USER_TIMEOUT, 1000 * SILENT_S),
    ):
      same.setsockopt(socket.IPPROTO_TCP, option, value)


def connect(
  address: tuple[str, int],
  secret: bytes,
  absent_s: float = 0.0,
  peer: str = 'the leading host',
) -> multiprocessing.connection.Connection:
  """Connects to a listener.

  Args:
    address: host and port; a name is resolved at each attempt.
    secret: proven by both sides.
    absent_s: how long to retry while nothing listens there.
    peer: what listens there.

  Raises:
    GroupLost: it is not there, is another learner's, or does not answer.
  """
  answers: queue.Queue = queue.Queue()
  give_up_s = time.monotonic() + absent_s

  def greet():
    while True:
      try:
        answers.put(
          multiprocessing.connection.Client(
            address, family='AF_INET', authkey=secret
          )
        )
      except (ConnectionRefusedError, socket.gaierror) as error:
        if time.monotonic() < give_up_s:
          time.sleep(AGAIN_S)
          continue
        answers.put(error)
      except (OSError, EOFError, multiprocessing.AuthenticationError) as error:
        answers.put(error)
      return

  threading.Thread(target=greet, daemon=True).start()
  try:
    answer = answers.get(timeout=CONNECT_S + absent_s)
  except queue.Empty:
    answer = TimeoutError(f'no answer in {CONNECT_S + absent_s:g} s')
  if isinstance(answer, multiprocessing.AuthenticationError):
    raise GroupLost(
      f'the host at {address[0]}:{address[1]} has another secret '
      '(--token_file), or is of another learner'
    ) from answer
  if isinstance(answer, Exception):
    raise GroupLost(f'{peer} at {address}: {answer}') from answer
  return answer


def own_address(towards: str) -> str:
  """Returns the IP literal of the interface by which `towards` is reached.

  Args:
    towards: host name or address; nothing is sent to it.
  """
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    probe.connect((towards, 9))
    return probe.getsockname()[0]
