# SPDX-License-Identifier: Apache-2.0
"""Inspects the sockets that this process has open, including a library's.

jax.experimental.transfer owns its sockets and offers no way to cut a peer off;
a duplicate of the file descriptor does. Linux only (`/proc/self/fd`).
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

_FD_FOLDER = '/proc/self/fd'
_TCP_FAMILIES = (socket.AF_INET, socket.AF_INET6)

# Two scans must not see each other's duplicates; a thread may nest its own.
_scanning = threading.RLock()


def tcp_sockets() -> Iterator[tuple[int, socket.socket]]:
  """Yields inode and a duplicate of each TCP socket; closes the duplicate."""
  for _, inode, found in _tcp_sockets():
    yield inode, found


def _tcp_sockets() -> Iterator[tuple[int, int, socket.socket]]:
  """Yields inode, descriptor number and duplicate of each TCP socket."""
  with _scanning:
    for name in os.listdir(_FD_FOLDER):
      try:
        kind, _, inode = os.readlink(f'{_FD_FOLDER}/{name}').partition(':')
        if kind != 'socket':
          continue
        duplicate = os.dup(int(name))
      except OSError:  # Closed by its owner since the listing.
        continue
      try:
        found = socket.socket(fileno=duplicate)
      except OSError:  # Its number was reused, not for a socket.
        os.close(duplicate)
        continue
      with found:
        if found.family in _TCP_FAMILIES and found.type == socket.SOCK_STREAM:
          yield int(name), int(inode.strip('[]')), found


def shared_listening_ports() -> set[int]:
  """Returns ports on which this process listens with SO_REUSEPORT.

  The transfer library sets that option and our own servers do not, which
  distinguishes them.
  """
  ports = set()
  for _, found in tcp_sockets():
    with contextlib.suppress(OSError):
      if is_listening(found) and found.getsockopt(
        socket.SOL_SOCKET, socket.SO_REUSEPORT
      ):
        ports.add(found.getsockname()[1])
  return ports


def listening(ports: set[int]) -> list[int]:
  """Returns descriptors of the sockets that listen on `ports`."""
  numbers = []
  for number, _, found in _tcp_sockets():
    with contextlib.suppress(OSError):  # Closed in the meantime.
      if is_listening(found) and found.getsockname()[1] in ports:
        numbers.append(number)
  return numbers


def shut_accepted(ports: set[int]) -> int:
  """Shuts the connections that were accepted on `ports`; returns their
  number.
  """
  count = 0
  for _, found in tcp_sockets():
    with contextlib.suppress(OSError):  # Shut or closed already.
      if found.getsockname()[1] in ports and not is_listening(found):
        found.shutdown(socket.SHUT_RDWR)
        count += 1
  return count


def shut_connected(host: str, port: int) -> int:
  """Shuts the connections that lead to `host:port`; returns their number."""
  count = 0
  for _, found in tcp_sockets():
    with contextlib.suppress(OSError):  # Not connected, or shut already.
      if found.getpeername()[:2] == (host, port):
        found.shutdown(socket.SHUT_RDWR)
        count += 1
  return count


def is_listening(found: socket.socket) -> bool:
  """Returns True if the socket waits for connections."""
  return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
