# SPDX-License-Identifier: Apache-2.0
"""The ports between the hosts of a learner: their addresses and their peers."""

import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from diloco.config.hardware import GROUP_SECRET
from diloco.learner.hosts import process_group
from diloco.run import bind_policy
from diloco.transport.auth import Access
from diloco.transport.sockets import free_port
from tests.commands import listening
from tests.learner.groups import Group
from tests.processes.processes import ENDLESS, START_S, Processes
from tests.survival.survival import BOWL

pytestmark = pytest.mark.beside

ON_TWO = (*BOWL, *ENDLESS, 'mesh.fsdp=2', 'run.step_floor_s=0.05')
STRANGER = pathlib.Path(__file__).parent / 'stranger.py'
SECRET = {GROUP_SECRET: 'of this start'}


def test_hosts_listen_at_the_address_that_they_were_given(tmp_path):
  """Ports are those of gRPC, of the learner itself and of JAX."""
  with Processes(tmp_path, *ON_TWO, 'transport.data_plane=grpc') as processes:
    processes.syncer()
    group = Group(processes, 0, 2, 2, SECRET)
    processes.until_merged(0)
    found = [listening(member.pid) for member in group.members]
  assert all(found), found
  beyond = [
    each
    for ports in found
    for each in ports
    if not each.startswith('127.0.0.1:')
  ]
  assert not beyond, found


@pytest.mark.soak
def test_a_stranger_at_the_coordinator_is_no_host(tmp_path):
  """The stranger comes first, and is not taken for host 1."""
  with Processes(tmp_path, *ON_TWO) as processes:
    processes.syncer()
    port = free_port()
    first = processes.host(0, 0, 2, port, 2, SECRET)
    processes.until(lambda: is_open(port), START_S, 'host 0 waits for others')
    code, said = stranger(f'127.0.0.1:{port}')
    assert 'joined' not in said, said
    assert code, said
    second = processes.host(0, 1, 2, port, 2, SECRET)
    processes.until_merged(0)
    # To both at once: the one that hears of it from the other is about to end.
    for member in (first, second):
      member.send(signal.SIGTERM)
    for member in (first, second):
      assert processes.exit_code(member) == 143


def test_another_secret_is_another_learner_s(tmp_path):
  with Processes(tmp_path, *ON_TWO) as processes:
    processes.syncer()
    port = free_port()
    processes.host(0, 0, 2, port, 2, SECRET)
    other = processes.host(0, 1, 2, port, 2, {GROUP_SECRET: 'guessed'})
    assert processes.exit_code(other) == 1
    [error] = other.errors
    assert 'has another secret (--token_file)' in error


def test_a_stranger_in_host_1_s_place_gets_nothing(tmp_path):
  """The stranger finds JAX's own port, and is quicker than host 1.

  Host 1 is this test: it proves itself, and is then not in JAX's world.
  """
  with Processes(tmp_path, *ON_TWO) as processes:
    processes.syncer()
    port = free_port()
    first = processes.host(0, 0, 2, port, 2, SECRET)
    lost = []
    leading, jax_at = process_group.rendezvous_join(
      ('127.0.0.1', port),
      bind_policy.group_secret(Access(), SECRET[GROUP_SECRET], 0),
      1,
      lost.append,
    )
    heard = []
    leading.on_message = heard.append
    code, said = stranger(jax_at)
    assert code == 0
    got = [line for line in said.splitlines() if not line.startswith('[Gloo]')]
    assert got == ['joined as 1'], said
    assert not heard  # Nobody is told to train: host 1 has not started.
    leading.close(1.0)  # As the kernel does for the dead.
    assert processes.exit_code(first) == 1
    [error] = first.errors
    assert error.startswith(
      'error: --host=0: gone before the learner was whole'
    )


def is_open(port: int) -> bool:
  try:
    socket.create_connection(('127.0.0.1', port), timeout=1.0).close()
  except OSError:
    return False
  return True


def stranger(address: str) -> tuple[int, str]:
  """Runs a stranger to its end; returns its exit code and stdout."""
  ended = subprocess.run(
    [sys.executable, str(STRANGER), address],
    env=os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '1'},
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
    timeout=START_S,
    check=False,
  )
  return ended.returncode, ended.stdout
