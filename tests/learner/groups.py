# SPDX-License-Identifier: Apache-2.0
"""A learner of one or several real processes, for the tests."""

import socket
from collections.abc import Mapping

from tests.processes.processes import START_S, Processes


class Group:
  """Starts all processes of one learner and waits for their ends.

  Args:
    processes: of the run.
    learner: its id.
    hosts: how many processes.
    devices: of the learner, over all of them.
    environment: of each, besides.
  """

  def __init__(
    self,
    processes: Processes,
    learner: int,
    hosts: int,
    devices: int,
    environment: Mapping[str, str] | None = None,
  ):
    self._processes = processes
    with socket.create_server(('127.0.0.1', 0)) as free:
      port = free.getsockname()[1]
    self.members = [
      processes.host(learner, host, hosts, port, devices, environment or {})
      for host in range(hosts)
    ]

  def exit_codes(self) -> list[int]:
    """Waits until all have exited."""
    return [
      self._processes.exit_code(member, START_S) for member in self.members
    ]
