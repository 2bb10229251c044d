# SPDX-License-Identifier: Apache-2.0
"""A learner of one or several real processes, for the tests."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence

from diloco.transport.sockets import free_port
from tests.processes.processes import START_S, Processes

ROOT = pathlib.Path(__file__).parents[2]


def world(
  module: str, *args: str, processes: int = 2, devices: int = 2
) -> list[subprocess.Popen]:
  """Starts the processes of a world of `module`.

  Args:
    *args: arguments before its index and the coordinator's address.
    devices: of each process.
  """
  coordinator = f'127.0.0.1:{free_port()}'
  environment = {'JAX_NUM_CPU_DEVICES': f'{devices}', 'JAX_PLATFORMS': 'cpu'}
  return [
    subprocess.Popen(
      [sys.executable, '-m', module, *args, str(process), coordinator],
      cwd=ROOT,
      env=os.environ | environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for process in range(processes)
  ]


def printed_by_two(module: str, *args: str) -> list[dict]:
  """Returns what the two processes of a world of `module` print at last."""
  return printed_by(world(module, *args))


def printed_by(running: list[subprocess.Popen]) -> list[dict]:
  """Waits for the processes; returns what they print at last."""
  try:
    outputs = [process.communicate(timeout=240) for process in running]
  finally:
    for process in running:
      process.kill()
  for process, (_, errors) in zip(running, outputs):
    assert process.returncode == 0, errors
  return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


class Group:
  """Starts all processes of one learner and waits for their ends.

  Args:
    processes: of the run.
    learner: its id.
    hosts: how many processes.
    devices: of the learner, over all of them.
    environment: of each, besides.
    overrides: of all.
  """

  def __init__(
    self,
    processes: Processes,
    learner: int,
    hosts: int,
    devices: int,
    environment: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
  ):
    self._processes = processes
    port = free_port()
    self.members = [
      processes.host(
        learner, host, hosts, port, devices, environment or {}, overrides
      )
      for host in range(hosts)
    ]

  def exit_codes(self) -> list[int]:
    """Waits until all have exited."""
    return [
      self._processes.exit_code(member, START_S) for member in self.members
    ]
