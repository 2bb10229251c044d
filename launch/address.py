# SPDX-License-Identifier: Apache-2.0
"""Finds the address at which a local syncer will listen."""

import errno
import socket

from diloco.config_values import ConfigError


def free_address(host: str, port: int) -> str:
  """'host:port' on which nobody listens; port 0 finds any.

  Raises:
    ConfigError: the host is unknown, not of this machine, or the port taken.
  """
  try:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  except socket.gaierror as error:
    raise ConfigError(
      [f'transport.host={host!r}: can not be resolved ({error.strerror})']
    ) from None
  family, kind, _, _, address = found[0]
  with socket.socket(family, kind) as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      probe.bind(address)
      probe.listen()
    except OSError as error:
      raise ConfigError([_refused(host, port, error)]) from None
    bound = probe.getsockname()[1]
  return f'[{host}]:{bound}' if ':' in host else f'{host}:{bound}'


def _refused(host: str, port: int, error: OSError) -> str:
  if error.errno == errno.EADDRINUSE:
    return f'transport.port={port}: is in use on {host}; 0 finds a free one'
  if error.errno == errno.EADDRNOTAVAIL:
    return f'transport.host={host!r}: is no address of this machine'
  return f'transport.host={host!r}, transport.port={port}: {error.strerror}'
