# SPDX-License-Identifier: Apache-2.0
"""The syncer's server of the control plane: a stream for each learner."""

import collections
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping

import grpc

from diloco.transport import access as access_lib
from diloco.transport import control_limits, listen, wire
from diloco.transport.control_session import Session, abort

_SPARE_WORKERS = 16  # For refused calls, and for sessions that are ending.
# gRPC delivers messages up to this much above the limit, so that they are
# refused by name; a larger one ends the session as 'lost'.
_OVERSIZED_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Tally:
  """How many messages were accepted, and how many refused for which flaw.

  Attributes:
    accepted: messages passed to `on_message`.
    refused: the others, by flaw (`wire.FLAWS`).
  """

  accepted: int
  refused: Mapping[str, int]


class ControlServer(grpc.GenericRpcHandler):
  """A server that listens for learners.

  Args:
    bind: host:port; port 0 for a free one.
    on_message: called with each message, the `Hello` first; calls for one
      session are sequential, those for several concurrent.
    on_closed: called once for each session whose `Hello` was delivered, after
      its last message, with the reason.
    access: what each learner must present.

  Raises:
    listen.BindFailed: the address is in use or not of this machine.
    addresses.HostUnknown: its host name does not resolve.
  """

  def __init__(
    self,
    bind: str,
    on_message: Callable[[Session, wire.Message], None],
    on_closed: Callable[[Session, str], None],
    limits: control_limits.ControlLimits = control_limits.DEFAULT,
    access: access_lib.Access = access_lib.OPEN,
  ):
    self._on_message = on_message
    self._on_closed = on_closed
    self._limits = limits
    self._access = access
    self._lock = threading.Lock()
    self._sessions: dict[Session, threading.Thread] = {}
    self._ended: collections.Counter[str] = collections.Counter()
    self._accepted = 0
    self._refused: collections.Counter[str] = collections.Counter()
    self._closing = False
    self._server = listen.ListeningServer(
      bind,
      self,
      workers_max=limits.sessions_max + _SPARE_WORKERS,
      message_bytes_max=limits.message_bytes_max + _OVERSIZED_BYTES,
      access=access,
      options=(
        *limits.channel_options(),
        ('grpc.http2.min_ping_interval_without_data_ms', 1_000),
      ),
    )
    self.address = self._server.address

  def ended(self) -> dict[str, int]:
    """Returns how many sessions have ended, by cause; includes refused ones."""
    with self._lock:
      return dict(self._ended)

  def heard(self) -> Tally:
    """Returns the counts of messages so far; each message counts once."""
    with self._lock:
      return Tally(self._accepted, dict(self._refused))

  def close(self) -> None:
    """Ends every session and every thread; idempotent.

    Do not call it from a callback: it waits for the callbacks to end.
    """
    with self._lock:
      self._closing = True
      sessions = dict(self._sessions)
    for session in sessions:
      session.close('the server closes')
    self._server.close(grace_s=self._limits.close_s)
    for reader in sessions.values():
      reader.join()

  def service(self, call):
    """Returns the handler of a call, for gRPC."""
    if call.method != control_limits.METHOD:
      return None
    return grpc.stream_stream_rpc_method_handler(self._converse)

  def _converse(
    self, requests: Iterator[bytes], context: grpc.ServicerContext
  ) -> Iterator[bytes]:
    self._check_token(context)
    session = Session(context, self._limits)
    reader = threading.Thread(
      target=self._read, args=(session, requests), name='control session'
    )
    with self._lock:
      full = self._closing or not self._has_room()
      if not full:
        self._sessions[session] = reader
        reader.start()
    if full:
      self._refuse(context, 'full', f'{self._limits.sessions_max} sessions')
    context.send_initial_metadata(control_limits.ACCEPTED)
    yield from session.bodies()

  def _has_room(self) -> bool:
    """Returns True if there is room for one more session.

    If there is not, a session without a hello makes room, so that silent
    connections keep no learner out, however many they are. The oldest one of
    the machine with the most of them is ended.
    """
    open_ = [session for session in self._sessions if session.is_open]
    if len(open_) < self._limits.sessions_max:
      return True
    silent = [s for s in open_ if not s.greeted]  # The oldest first.
    if not silent:
      return False
    machines = collections.Counter(map(_machine, silent))
    oldest = max(silent, key=lambda s: machines[_machine(s)])
    oldest.end('crowded out', 'another came, and no hello from you yet')
    return True

  def _count(self, flaw: str | None) -> None:
    with self._lock:
      if flaw is None:
        self._accepted += 1
      else:
        self._refused[flaw] += 1

  def _read(self, session: Session, requests: Iterator[bytes]) -> None:
    try:
      session.read(requests, self._on_message, self._count)
    finally:
      cause, reason = session.settle('failed', 'on_message raised')
      with self._lock:
        del self._sessions[session]
        self._ended[cause] += 1
      if session.greeted:
        self._on_closed(session, reason)

  def _check_token(self, context: grpc.ServicerContext) -> None:
    if not self._access.admits(context.invocation_metadata()):
      self._refuse(context, 'token', 'the token is missing or wrong')

  def _refuse(
    self, context: grpc.ServicerContext, cause: str, reason: str
  ) -> None:
    with self._lock:
      self._ended[cause] += 1
    abort(context, cause, reason)


def _machine(session: Session) -> str:
  """Returns gRPC's name of the peer's address, without the port."""
  return session.peer.rpartition(':')[0]
