# SPDX-License-Identifier: Apache-2.0
"""The swarm's command, as a process that is stopped."""

import signal
import subprocess
import sys

import psutil
import pytest

from tests import waiting

pytestmark = pytest.mark.beside

JOBS = 2
DEADLINE_S = 120.0


@pytest.mark.parametrize('stop', [signal.SIGTERM, signal.SIGINT])
def test_its_processes_end_with_it(stop):
  command = [sys.executable, '-m', 'diloco.swarm', '--seeds=0:1000000']
  with subprocess.Popen([*command, f'--jobs={JOBS}']) as process:
    try:
      parent = psutil.Process(process.pid)
      # Beside them, Python has one for what they share.
      started = lambda: len(parent.children()) > JOBS  # noqa: E731
      waiting.until(started, DEADLINE_S, 'its processes')
      children = parent.children()
      process.send_signal(stop)
      assert process.wait(DEADLINE_S) == 128 + stop
      _, alive = psutil.wait_procs(children, timeout=DEADLINE_S)
      assert not alive
    finally:
      process.kill()
