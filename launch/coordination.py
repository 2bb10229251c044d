# SPDX-License-Identifier: Apache-2.0
"""JAX's coordination service for a learner of several slices, in a process
outside of them all.
"""

import select
import subprocess
import sys

from diloco.transport import sockets
from launch.parent_death import dying_with_parent

SERVES_S = 60.0  # Within which it listens; it imports jax first.


class Coordination:
  """The service of one world after the other.

  The process is started with the first of them, and dies with this one.

  Args:
    name: of the learner.
  """

  def __init__(self, name: str):
    self._name = name
    self._process: subprocess.Popen | None = None

  def serve(self, hosts: int, address: str = sockets.LOOPBACK) -> str:
    """Returns 'host:port' of the service for the next world.

    Call it from the main thread.

    Args:
      hosts: of the world.
      address: IP literal of this machine for them.

    Raises:
      RuntimeError: it does not listen in time.
    """
    if self._process is None:
      self._process = subprocess.Popen(
        dying_with_parent(
          [sys.executable, '-m', 'diloco.learner.coordination']
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
      )
    at = sockets.join(address, sockets.free_port(address))
    self._process.stdin.write(f'{hosts} {at}\n')
    self._process.stdin.flush()
    answer = self._process.stdout
    there, *_ = select.select([answer], [], [], SERVES_S)
    if not there or answer.readline().strip() != at:
      raise RuntimeError(f'{self._name}: JAX does not serve at {at}')
    return at

  def end(self) -> None:
    """Ends the process, if there is one."""
    if self._process is not None:
      self._process.kill()
      self._process.wait()
      self._process = None
