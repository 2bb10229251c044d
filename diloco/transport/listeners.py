# SPDX-License-Identifier: Apache-2.0
"""Ends the listening sockets of a library that must not accept any more.

jax.experimental.transfer takes its callback away before its event loop knows
that it is to stop. A connection that is accepted in between calls nothing:
SIGSEGV (jaxlib 0.10.2 and 0.12; one drop in a few hundred on a busy machine,
where somebody had just connected). So nothing may be left to accept.
"""

import os
import socket

from diloco.transport import sockets

LOOPBACK = '127.0.0.1'


def end(ports: set[int], timeout_s: float) -> bool:
  """Refuses peers on `ports` from now on; waits for accepts under way.

  Args:
    ports: Where this process listens through a library's sockets, whose event
      loop accepts, and closes a connection that its peer has ended.
    timeout_s: For the event loop to come round, in seconds.

  Returns:
    Whether each loop is known to accept nothing any more. Their descriptors
    stay open, for the library to close.
  """
  ended = [_end_one(each, timeout_s) for each in sockets.listening(ports)]
  return all(ended)


def _end_one(number: int, timeout_s: float) -> bool:
  """Gives the loop a private listener in place of the one it has.

  A loop that has served a connection to that one is done with whatever it
  had accepted before; and nobody else knows its port.
  """
  try:
    with (
      socket.create_server((LOOPBACK, 0)) as private,
      socket.create_connection(private.getsockname(), timeout_s) as witness,
      socket.socket(fileno=os.dup(number)) as old,
    ):
      private.setblocking(False)  # For a loop that was woken for nothing.
      os.dup2(private.fileno(), number, inheritable=False)
      # Wakes a loop that still waits on the old one; it finds the witness.
      old.shutdown(socket.SHUT_RDWR)
      witness.shutdown(socket.SHUT_WR)
      return not witness.recv(1)
  except OSError:  # No answer in time, no loopback, no descriptor left.
    return False
