# SPDX-License-Identifier: Apache-2.0
"""Ends the listening sockets of a library that must not accept any more.

jax.experimental.transfer removes its callback before its event loop knows that
it has to stop. A connection that is accepted in between calls a null function:
SIGSEGV (jaxlib 0.10.2 and 0.12; one drop in a few hundred on a busy machine, if
a peer had just connected). So nothing may be left to accept.
"""

import os
import socket

from diloco.transport import sockets

LOOPBACK = '127.0.0.1'


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
  ended = [_end_one(each, timeout_s) for each in sockets.listening(ports)]
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
