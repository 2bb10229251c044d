# SPDX-License-Identifier: Apache-2.0
"""A JAX world under the supervisor loses a host, and is there again."""

import os
import pathlib
import signal
import sys

import pytest

from launch.program import Role, on_this_machine
from launch.supervisor import Supervisor
from tests.backends.launch_values import a_config
from tests.waiting import until

pytestmark = pytest.mark.beside

DEADLINE_S = 240.0  # On a machine that others work on too.
MEMBER = pathlib.Path(__file__).parent / 'group_member.py'
SUM = '4 devices of 2 hosts: 6.0'


def test_a_world_of_two_hosts(tmp_path):
  """Two processes, each with half of the mesh's four devices, of the CPU."""
  each, _ = on_this_machine(a_config(4), '2,1', True, '')
  argv = (sys.executable, str(MEMBER))
  role = Role('learner-0', argv, hosts=each.hosts, environment=each.environment)
  pids = {}

  def announce(event):
    if event.event == 'started':
      pids[event.process] = event.pid

  watched = Supervisor(
    [role],
    log=lambda name: tmp_path / f'{name}.log',
    environment=os.environ | {'JAX_PLATFORMS': 'cpu'},
    restarts_max=5,  # On a busy machine they may not meet at once.
    restart_delay_s=0.05,
    announce=announce,
  )
  with watched:
    _until_summed(watched, tmp_path)
    for victim in ('learner-0.1', 'learner-0'):
      starts = watched.states()[0].starts
      os.kill(pids[victim], signal.SIGKILL)

      def started_again(starts=starts) -> bool:
        watched.poll()
        return watched.states()[0].starts > starts

      # A heartbeat is missed only after this deadline.
      until(started_again, DEADLINE_S, f'start {starts + 1}')
      for path in tmp_path.glob('*.log'):  # Of the last world.
        path.write_text('')
      _until_summed(watched, tmp_path)


def _until_summed(watched, folder):
  logs = [folder / 'learner-0.log', folder / 'learner-0.1.log']

  def summed() -> bool:
    watched.poll()
    assert watched.failure is None, logs[0].read_text()
    return all(path.exists() and SUM in path.read_text() for path in logs)

  until(summed, DEADLINE_S, lambda: logs[0].read_text())
