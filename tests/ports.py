# SPDX-License-Identifier: Apache-2.0
"""Ports for processes that are told where to listen, and come back there.

The kernel takes the source port of an outgoing connection from a range of its
own; a port of that range may be taken by one while its listener is away.
"""

import pathlib
import random
import socket

RANGE = pathlib.Path('/proc/sys/net/ipv4/ip_local_port_range')
LEAST, USUAL_FIRST = 10_000, 32_768
TRIES = 100


def free_port() -> int:
  """Returns a port on loopback without a listener, below that range."""
  first = int(RANGE.read_text().split()[0]) if RANGE.exists() else USUAL_FIRST
  most = first if first > LEAST else USUAL_FIRST
  for _ in range(TRIES):
    port = random.randrange(LEAST, most)
    try:
      socket.create_server(('127.0.0.1', port)).close()
    except OSError:
      continue
    return port
  raise RuntimeError(f'no port from {LEAST} to {most} is free')
