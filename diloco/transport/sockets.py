# SPDX-License-Identifier: Apache-2.0
"""Addresses, and the sockets of this process: ends, bytes, ports.

Names are resolved here only: jax.experimental.transfer takes any name for
0.0.0.0, and gRPC reports an unknown name only by a time-out.
"""

import contextlib
import dataclasses
import errno
import ipaddress
import os
import pathlib
import re
import secrets
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_HOST_PORT = re.compile(r'^(?:\[([^\[\]]+)\]|([^\[\]:/\s]+)):(\d{1,5})$')
_TOKEN = re.compile(r'^[0-9a-f]{16,64}$')
_FD_FOLDER = '/proc/self/fd'
_RANGE = pathlib.Path('/proc/sys/net/ipv4/ip_local_port_range')
_USUAL_RANGE, _LEAST_PORT, _PORT_TRIES = 32_768, 10_000, 100
_TCP_FAMILIES = (socket.AF_INET, socket.AF_INET6)

# Two scans must not see each other's duplicates; a thread may nest its own.
_scanning = threading.RLock()
LOOPBACK = '127.0.0.1'
# struct tcp_info of linux/tcp.h: 8 bytes, 24 u32, then u64s; the third and
# fourth of these are tcpi_bytes_acked and tcpi_bytes_received (RFC 4898).
_BYTES_OFFSET = 8 + 24 * 4 + 2 * 8
_TCP_INFO_BYTES = _BYTES_OFFSET + 16
_ESTABLISHED = 1  # The first byte, tcpi_state: neither side has ended it.


class BadAddress(ValueError):
  """A text that is not an address of the expected kind."""


class HostUnknown(ValueError):
  """A host name that does not resolve."""


@dataclasses.dataclass(frozen=True)
class PublisherAddress:
  """The address of one publisher of a data plane, and the key to it.

  As text: `scheme://host:port/token`, such as `grpc://10.0.0.7:4711/9f…`.
  """

  scheme: str
  host: str
  port: int
  # Hexadecimal, random; keeps other peers away from this one's offers.
  token: str

  def __str__(self) -> str:
    return f'{self.scheme}://{join(self.host, self.port)}/{self.token}'

  @property
  def endpoint(self) -> str:
    """The text `host:port`."""
    return join(self.host, self.port)

  def resolved(self) -> 'PublisherAddress':
    """Returns the address with an IP literal as host; raises `HostUnknown`."""
    return dataclasses.replace(self, host=resolve(self.host))


def parse_publisher(text: str, scheme: str) -> PublisherAddress:
  """Parses a publisher's address; raises `BadAddress`, which names the flaw."""
  actual, mark, rest = text.partition('://')
  if not mark or actual != scheme:
    raise BadAddress(f'address {text!r}: must start with {scheme}://')
  endpoint, _, token = rest.partition('/')
  if not _TOKEN.match(token):
    raise BadAddress(f'address {text!r}: no token after host:port/')
  host, port = split(endpoint)
  if not port:
    raise BadAddress(f'address {text!r}: port 0 cannot be connected to')
  return PublisherAddress(scheme, host, port, token)


def split(endpoint: str) -> tuple[str, int]:
  """Returns host and port of `host:port`, `[v6]:port`; raises `BadAddress`."""
  match = _HOST_PORT.match(endpoint)
  if match is None or int(match[3]) > 65535:
    raise BadAddress(
      f'address {endpoint!r}: must be host:port or [ipv6]:port, port ≤ 65535'
    )
  return match[1] or match[2], int(match[3])


def join(host: str, port: int) -> str:
  """Returns `host:port`, with brackets around an IPv6 literal."""
  return f'[{host}]:{port}' if ':' in host else f'{host}:{port}'


def resolve(host: str) -> str:
  """Returns an IP literal for `host`, IPv4 if there is one.

  Raises:
    HostUnknown: the name does not resolve.
  """
  if is_literal(host):
    return host
  try:
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
  except (OSError, UnicodeError) as error:
    raise HostUnknown(
      f'host {host!r} does not resolve ({error}); give a name that this '
      'machine knows, or an IP address'
    ) from error
  addresses.sort(key=lambda entry: entry[0] != socket.AF_INET)
  return addresses[0][4][0]


def is_literal(host: str) -> bool:
  """Returns True if `host` is an IP address and not a name."""
  try:
    ipaddress.ip_address(host)
  except ValueError:
    return False
  return True


def is_loopback(host: str) -> bool:
  """Returns True if `host` can be reached from this machine only.

  Raises:
    HostUnknown: the name does not resolve.
  """
  return ipaddress.ip_address(resolve(host)).is_loopback


def routable(host: str) -> str:
  """Returns `resolve(host)`; raises if no peer could connect to it."""
  literal = resolve(host)
  if ipaddress.ip_address(literal).is_unspecified:
    raise BadAddress(
      f'host {host!r} means every interface and no peer can connect to it; '
      'give the address of one'
    )
  return literal


def probe(host: str, port: int, timeout_s: float) -> None:
  """Opens and closes a TCP connection; raises the `OSError` it met."""
  socket.create_connection((host, port), timeout=timeout_s).close()


def free_port(host: str = LOOPBACK, count: int = 1) -> int:
  """Returns a port of this machine for a listener that is yet to start.

  It lies below the range from which the kernel takes the source ports of
  outgoing connections: a port of that range may be one before the listener is
  there, or while it restarts.

  Args:
    host: IP literal of this machine.
    count: this many ports, from the returned one on, have no listener.

  Raises:
    OSError: the address is not this machine's, or no port was found.
  """
  first = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 0
  most = first if first > _LEAST_PORT + count else _USUAL_RANGE
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  for _ in range(_PORT_TRIES):
    port = _LEAST_PORT + secrets.randbelow(most - _LEAST_PORT - count)
    try:
      for number in range(port, port + count):
        socket.create_server((host, number), family=family).close()
    except OSError as error:
      if error.errno != errno.EADDRINUSE:
        raise
    else:
      return port
  raise OSError(
    errno.EADDRINUSE, f'no {count} ports from {_LEAST_PORT} to {most} are free'
  )


# Inspects the sockets that this process has open, including a library's.
#
# jax.experimental.transfer owns its sockets and offers no way to cut a peer
# off; a duplicate of the file descriptor does. Linux only (`/proc/self/fd`).


def _tcp_sockets() -> Iterator[tuple[int, int, socket.socket]]:
  """Yields descriptor number, inode and a duplicate of each TCP socket.

  It closes the duplicate.
  """
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
        sock = socket.socket(fileno=duplicate)
      except OSError:  # Its number was reused, not for a socket.
        os.close(duplicate)
        continue
      with sock:
        if sock.family in _TCP_FAMILIES and sock.type == socket.SOCK_STREAM:
          yield int(name), int(inode.strip('[]')), sock


def shared_listening_ports() -> set[int]:
  """Returns ports on which this process listens with SO_REUSEPORT.

  The transfer library sets that option and our own servers do not, which
  distinguishes them.
  """
  ports = set()
  for _, _, sock in _tcp_sockets():
    with contextlib.suppress(OSError):
      if is_listening(sock) and sock.getsockopt(
        socket.SOL_SOCKET, socket.SO_REUSEPORT
      ):
        ports.add(sock.getsockname()[1])
  return ports


def shut_accepted(ports: set[int]) -> int:
  """Shuts the connections accepted on `ports`; returns their number."""
  count = 0
  for _, _, sock in _tcp_sockets():
    with contextlib.suppress(OSError):  # Shut or closed already.
      if sock.getsockname()[1] in ports and not is_listening(sock):
        sock.shutdown(socket.SHUT_RDWR)
        count += 1
  return count


def count_accepted(ports: set[int]) -> int:
  """Returns the number of open connections that were accepted on `ports`."""
  count = 0
  for _, _, sock in _tcp_sockets():
    with contextlib.suppress(OSError):  # Closed in the meantime.
      if sock.getsockname()[1] in ports and not is_listening(sock):
        state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        count += state == _ESTABLISHED
  return count


def is_listening(sock: socket.socket) -> bool:
  """Returns True if the socket waits for connections."""
  return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


# Ends the listening sockets of a library that must not accept any more.
#
# jax.experimental.transfer removes its callback before its event loop knows
# that it has to stop. A connection that is accepted in between calls a null
# function: SIGSEGV (jaxlib 0.10.2 and 0.12; one drop in a few hundred on a busy
# machine, if a peer had just connected). So nothing may be left to accept.


def end(ports: set[int], timeout_s: float) -> bool:
  """Refuses peers on `ports` from now on; waits for accepts in progress.

  Args:
    ports: ports of a library's listening sockets in this process. Its event
      loop accepts, and closes a connection that its peer has ended.
    timeout_s: time limit for a turn of the event loop, in seconds.

  Returns:
    True if each loop is known to accept nothing any more. Their descriptors
    stay open, for the library to close.
  """
  numbers = []
  for number, _, sock in _tcp_sockets():
    with contextlib.suppress(OSError):  # Closed in the meantime.
      if is_listening(sock) and sock.getsockname()[1] in ports:
        numbers.append(number)
  ended = [_end_one(number, timeout_s) for number in numbers]
  return all(ended)


def _end_one(number: int, timeout_s: float) -> bool:
  """Replaces the loop's listener by a private one.

  A loop that has served a connection to the private one has finished whatever
  it accepted before, and no peer knows the private port.
  """
  try:
    with (
      socket.create_server((LOOPBACK, 0)) as private,
      socket.create_connection(private.getsockname(), timeout_s) as witness,
      socket.socket(fileno=os.dup(number)) as old,
    ):
      private.setblocking(False)  # The loop may be woken for nothing.
      os.dup2(private.fileno(), number, inheritable=False)
      # Wakes a loop that still waits on the old one; it finds the witness.
      old.shutdown(socket.SHUT_RDWR)
      witness.shutdown(socket.SHUT_WR)
      return not witness.recv(1)
  except OSError:  # No answer in time, no loopback, no descriptor left.
    return False


# Counts the bytes that this process's TCP sockets carried, as TCP saw them.
#
# The count includes framing, keepalives and whatever a library adds, so that
# "bytes per parameter" is measured on the wire.


class SocketBytes(NamedTuple):
  """TCP payload bytes, acknowledged by the other side or received."""

  sent: int
  received: int


class SocketMeter:
  """Totals over all sockets seen since its creation, closed ones included.

  A socket that closes keeps what it had when last sampled, so sample at least
  once before each close that matters. Thread-safe; Linux only.
  """

  def __init__(self):
    self._lock = threading.Lock()
    self._open = _per_socket()
    # Of the sockets that are closed by now, less what was there at the start.
    self._closed = SocketBytes(*(-x for x in _total(self._open.values())))

  def sample(self) -> SocketBytes:
    """Samples the sockets; returns the totals since the start."""
    with self._lock:
      before, self._open = self._open, _per_socket()
      gone = (before[inode] for inode in before.keys() - self._open.keys())
      self._closed = _total((self._closed, *gone))
      return _total((self._closed, *self._open.values()))


def _total(counts: Iterable[SocketBytes]) -> SocketBytes:
  return SocketBytes(*map(sum, zip((0, 0), *counts)))


def _per_socket() -> dict[int, SocketBytes]:
  counts = {}
  for _, inode, sock in _tcp_sockets():
    if is_listening(sock):
      continue
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES:
      raise OSError(
        f'TCP_INFO has {len(info)} bytes here, {_TCP_INFO_BYTES} are needed '
        '(Linux 4.2 or later)'
      )
    counts[inode] = SocketBytes(*struct.unpack_from('=QQ', info, _BYTES_OFFSET))
  return counts
