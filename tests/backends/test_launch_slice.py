# SPDX-License-Identifier: Apache-2.0
"""The startup scripts of one slice side by side: they meet again and again."""

import os
import pathlib
import random
import signal
import subprocess
import sys

import pytest

from diloco.transport.sockets import free_port
from launch.backends import startup
from tests.backends.launch_values import a_slice_launch
from tests.waiting import until

pytestmark = pytest.mark.beside

HERE = pathlib.Path(__file__).parent
HOSTS = 4
DEADLINE_S = 240.0  # On a machine that others work on too.
# A second of a script is 1/40 here: 30 s become 0.75 s, and the stand-ins of
# the learner, which are to be dead within 20 s, are within 0.5 s.
SLEEP = f"""#!{sys.executable} -IS
import sys, time
time.sleep(float(sys.argv[1]) / 40)
"""
CURL = """#!/bin/bash
case "$*" in
  *agent-worker-number*) echo "$HOST" ;;
  *worker-network-endpoints*) echo 'a:8470:10.0.0.5,b:8470:10.0.0.6' ;;
  *network-interfaces*) echo 10.0.0.7 ;;
esac
"""
DOCKER = f"""#!/bin/sh
exec {sys.executable} -IS {HERE}/fake_slice.py "$@"
"""


class Slice:
  """Runs one script for each host, in a process group of its own."""

  def __init__(self, folder):
    self.folder = folder
    for name, text in (
      ('curl', CURL),
      ('sleep', SLEEP),
      ('docker', DOCKER),
    ):
      (folder / name).write_text(text)
      (folder / name).chmod(0o755)
    (folder / 'port').write_text(str(free_port()))
    whole = a_slice_launch(accelerator='v5litepod-16')
    self.script = startup.startup_script(
      whole, whole.learners[0], 'p', '10.0.0.1:7777', 1
    )
    self.hosts = {}

  def boot(self, host):
    self.hosts[host] = subprocess.Popen(
      ['bash', '-c', self.script],
      env={
        **os.environ,
        'PATH': f'{self.folder}:{os.environ["PATH"]}',
        'FAKES': str(self.folder),
        'DILOCO_FOLDER': str(self.folder / f'host-{host}'),
        'HOST': str(host),
      },
      stdout=subprocess.DEVNULL,
      process_group=0,
    )

  def fall(self, host):
    """The machine is gone, with all that it runs."""
    os.killpg(self.hosts[host].pid, signal.SIGKILL)
    self.hosts.pop(host).wait()

  def kill_learner(self, host):
    os.kill(int((self.folder / f'pid.{host}').read_text()), signal.SIGKILL)

  def met(self, host):
    """Returns how often this host was in a world of all hosts."""
    path = self.folder / f'met.{host}'
    return len(path.read_text().splitlines()) if path.exists() else 0

  def until_met(self, times):
    until(
      lambda: all(self.met(host) >= times for host in range(HOSTS)),
      DEADLINE_S,
      lambda: f'{times} worlds: {list(map(self.met, range(HOSTS)))}',
    )


@pytest.fixture
def machines(tmp_path):
  found = Slice(tmp_path)
  for host in range(HOSTS):
    found.boot(host)
  yield found
  for host in list(found.hosts):
    found.fall(host)


def test_after_any_death_all_meet_again(machines):
  victims = random.Random(0).sample(range(HOSTS), HOSTS)
  for times, victim in enumerate(victims, start=1):
    machines.until_met(times)
    machines.kill_learner(victim)
  machines.until_met(HOSTS + 1)
  assert [machines.met(host) for host in range(HOSTS)] == [HOSTS + 1] * HOSTS


@pytest.mark.parametrize('host', [0, 2])
def test_a_machine_that_is_back_before_the_others_know(machines, host):
  """The machine finds no host that takes it in, until the others have died."""
  machines.until_met(1)
  machines.fall(host)
  machines.boot(host)
  machines.until_met(2)
