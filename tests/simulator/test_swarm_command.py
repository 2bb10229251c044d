# SPDX-License-Identifier: Apache-2.0
"""The swarm's command, as a process that is stopped."""

import contextlib
import os
import pty
import signal
import subprocess
import sys

import psutil
import pytest

from tests import waiting

pytestmark = pytest.mark.beside

JOBS = 2
DEADLINE_S = 120.0


def test_ctrl_c_ends_a_single_process_without_a_traceback():
  command = [sys.executable, '-m', 'diloco.swarm', '--seeds=0:1000000']
  ours, terminal = pty.openpty()
  os.set_blocking(ours, False)
  said = b''

  def says(wanted: bytes) -> bool:
    nonlocal said
    with contextlib.suppress(BlockingIOError):
      said += os.read(ours, 1 << 16)
    return wanted in said

  with subprocess.Popen(command, stderr=terminal) as process:
    try:
      waiting.until(lambda: says(b'/1,000,000, about '), DEADLINE_S, 'seeds')
      process.send_signal(signal.SIGINT)
      assert process.wait(DEADLINE_S) == 128 + signal.SIGINT
      waiting.until(lambda: says(b'stopped'), DEADLINE_S, 'its last word')
      assert b'Traceback' not in said
    finally:
      process.kill()
      os.close(ours)
      os.close(terminal)


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
