# SPDX-License-Identifier: Apache-2.0
"""Stands for srun --kill-on-bad-exit=1: one task a node, all on this machine.

A signal goes to all processes of all tasks; where one task fails, the others
are killed; the exit code is the highest of theirs, as srun's is.
"""

import os
import signal
import subprocess
import sys
import time

POLL_S = 0.02


def main(argv):
  while argv[0].startswith('--'):
    assert argv.pop(0) == '--kill-on-bad-exit=1'
  tasks = []
  signal.signal(signal.SIGTERM, lambda number, frame: send(tasks, number))
  for i in range(int(os.environ['SLURM_NNODES'])):
    environment = {**os.environ, 'SLURM_PROCID': str(i)}
    task = subprocess.Popen(argv, env=environment, start_new_session=True)
    tasks.append(task)
  while None in [task.poll() for task in tasks]:
    if any(task.returncode for task in tasks):
      send(tasks, signal.SIGKILL)
    time.sleep(POLL_S)  # As srun does, which looks at its tasks by turns.
  codes = (task.returncode for task in tasks)
  sys.exit(max(code if code >= 0 else 128 - code for code in codes))


def send(tasks, number):
  for task in tasks:
    if task.returncode is None:
      os.killpg(task.pid, number)


if __name__ == '__main__':
  main(sys.argv[1:])
