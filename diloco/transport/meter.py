# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that this process's TCP sockets carried, as TCP saw them.

The count includes framing, keepalives and whatever a library adds, so that
"bytes per parameter" is measured on the wire.
"""

import dataclasses
import socket
import struct
import sys
import threading

from diloco.transport import sockets

# struct tcp_info of linux/tcp.h: 8 bytes, 24 u32, then u64s; the third and
# fourth of these are tcpi_bytes_acked and tcpi_bytes_received (RFC 4898).
_BYTES_OFFSET = 8 + 24 * 4 + 2 * 8
_TCP_INFO_BYTES = _BYTES_OFFSET + 16


@dataclasses.dataclass(frozen=True)
class SocketBytes:
  """TCP payload bytes, acknowledged by the other side or received."""

  sent: int
  received: int


class SocketMeter:
  """Totals over all sockets seen since its creation, closed ones included.

  A socket that closes keeps what it had when last sampled, so sample at least
  once before each close that matters. Thread-safe.
  """

  def __init__(self):
    _require_linux()
    self._lock = threading.Lock()
    self._open = _per_socket()
    # Totals of the sockets that are closed by now.
    self._sent = self._received = 0
    self._start = self._total()

  def sample(self) -> SocketBytes:
    """Samples the sockets; returns the totals since the start."""
    with self._lock:
      now = _per_socket()
      for inode in self._open.keys() - now.keys():
        self._sent += self._open[inode].sent
        self._received += self._open[inode].received
      self._open = now
      total = self._total()
    return SocketBytes(
      total.sent - self._start.sent, total.received - self._start.received
    )

  def _total(self) -> SocketBytes:
    seen = self._open.values()
    return SocketBytes(
      self._sent + sum(s.sent for s in seen),
      self._received + sum(s.received for s in seen),
    )


def socket_bytes() -> SocketBytes:
  """Returns totals over the TCP sockets that are open now."""
  _require_linux()
  seen = _per_socket().values()
  return SocketBytes(sum(s.sent for s in seen), sum(s.received for s in seen))


def _per_socket() -> dict[int, SocketBytes]:
  counts = {}
  for inode, found in sockets.tcp_sockets():
    if sockets.is_listening(found):
      continue
    info = found.getsockopt(
      socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES
    )
    if len(info) < _TCP_INFO_BYTES:
      raise OSError(
        f'TCP_INFO has {len(info)} bytes here, {_TCP_INFO_BYTES} are needed '
        '(Linux 4.2 or later)'
      )
    counts[inode] = SocketBytes(*struct.unpack_from('=QQ', info, _BYTES_OFFSET))
  return counts


def _require_linux() -> None:
  if sys.platform != 'linux':
    raise NotImplementedError(
      f'socket bytes are read from TCP_INFO, on Linux only; this is '
      f'{sys.platform}'
    )
