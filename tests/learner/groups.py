# SPDX-License-Identifier: Apache-2.0
"""A learner of one or several real processes, for the tests."""

from collections.abc import Mapping

from diloco.transport.sockets import free_port
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
    port = free_port()
    self.members = [
      processes.host(learner, host, hosts, port, devices, environment or {})
      for host in range(hosts)
    ]

  def exit_codes(self) -> list[int]:
    """Waits until all have exited."""
    return [
      self._processes.exit_code(member, START_S) for member in self.members
    ]
