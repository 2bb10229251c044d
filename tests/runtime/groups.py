# SPDX-License-Identifier: Apache-2.0
"""A learner of one or several real processes, for the tests."""

import itertools
import socket

from tests.runtime.processes import START_S, Processes

_numbers = itertools.count()


class Group:
  """All processes of one learner.

  Args:
    processes: of the run.
    learner: its id.
    hosts: how many processes.
    devices: of the learner, over all of them.
  """

  def __init__(
    self, processes: Processes, learner: int, hosts: int, devices: int
  ):
    self._processes = processes
    with socket.create_server(('127.0.0.1', 0)) as free:
      port = free.getsockname()[1]
    number = next(_numbers)
    self.members = [
      processes.learner(
        learner,
        name=f'learner-{learner}-host-{host}-{number}',
        flags=(
          f'--hosts={hosts}',
          f'--host={host}',
          f'--coordinator=127.0.0.1:{port}',
        )
        if hosts > 1
        else (),
        environment={'JAX_NUM_CPU_DEVICES': str(devices // hosts)},
      )
      for host in range(hosts)
    ]

  def exit_codes(self) -> list[int]:
    """Waits until all have exited."""
    return [
      self._processes.exit_code(member, START_S) for member in self.members
    ]
