# SPDX-License-Identifier: Apache-2.0
"""Parses, formats and resolves the addresses of both planes.

Names are resolved here only: jax.experimental.transfer takes any name for
0.0.0.0, and gRPC reports an unknown name only by a time-out.
"""

import dataclasses
import ipaddress
import re
import socket

_HOST_PORT = re.compile(r'^(?:\[([^\[\]]+)\]|([^\[\]:/\s]+)):(\d{1,5})$')
_TOKEN = re.compile(r'^[0-9a-f]{16,64}$')


class BadAddress(ValueError):
  """A text that is not an address of the expected kind."""


class HostUnknown(ValueError):
  """A host name that does not resolve."""


@dataclasses.dataclass(frozen=True)
class OutletAddress:
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

  def resolved(self) -> 'OutletAddress':
    """Returns the address with an IP literal as host; raises `HostUnknown`."""
    return dataclasses.replace(self, host=resolve(self.host))


def parse_outlet(text: str, scheme: str) -> OutletAddress:
  """Parses a publisher's address; raises `BadAddress`, which names the flaw."""
  found, mark, rest = text.partition('://')
  if not mark or found != scheme:
    raise BadAddress(f'address {text!r}: must start with {scheme}://')
  endpoint, _, token = rest.partition('/')
  if not _TOKEN.match(token):
    raise BadAddress(f'address {text!r}: no token after host:port/')
  host, port = split(endpoint)
  if not port:
    raise BadAddress(f'address {text!r}: port 0 cannot be connected to')
  return OutletAddress(scheme, host, port, token)


def split(endpoint: str) -> tuple[str, int]:
  """Returns host and port of `host:port` or `[v6]:port`; raises
  `BadAddress`.
  """
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
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
  except (OSError, UnicodeError) as error:
    raise HostUnknown(
      f'host {host!r} does not resolve ({error}); give a name that this '
      'machine knows, or an IP address'
    ) from error
  found.sort(key=lambda entry: entry[0] != socket.AF_INET)
  return found[0][4][0]


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
