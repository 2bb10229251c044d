# SPDX-License-Identifier: Apache-2.0
"""Slurm: a learner of several nodes starts, leaves and dies as one."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import psutil
import pytest

from launch.backends import slurm
from tests.backends.launch_values import a_launch, check_golden
from tests.waiting import until

pytestmark = pytest.mark.beside

HERE = pathlib.Path(__file__).parent
DEADLINE_S = 240.0  # On a machine that others work on too.
SRUN = f'#!/bin/sh\nexec {sys.executable} -IS {HERE}/fake_srun.py "$@"\n'
SCONTROL = """#!/bin/bash
case $1 in
  show) printf 'node-3\\nnode-4\\n' ;;
  requeue) echo "$2" >>"$FAKES/requeues" ;;
esac
"""
# Stands for Python on a node: does what file 'does.I' says; else it stays.
PYTHON = f"""#!{sys.executable} -IS
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ['FAKES'])
host = os.environ['SLURM_PROCID']
def leave(number, frame):
  time.sleep(float(host) / 2)  # One is slower than the other.
  (folder / f'left.{{host}}').touch()
  sys.exit(143)
signal.signal(signal.SIGTERM, leave)
(folder / f'argv.{{host}}').write_text(json.dumps(sys.argv[1:]))
(folder / f'pid.{{host}}').write_text(str(os.getpid()))
does = folder / f'does.{{host}}'
if does.exists():
  sys.exit(int(does.read_text()))
while True:
  signal.pause()
"""


class Job:
  """The job of one learner of two nodes."""

  def __init__(self, folder):
    self.folder = folder
    workdir = folder / 'work dir'
    (workdir / 'logs').mkdir(parents=True)
    (workdir / slurm.ADDRESS).write_text('10.0.0.1:7777\n')
    for name, text in (
      ('srun', SRUN),
      ('scontrol', SCONTROL),
      ('python', PYTHON),
    ):
      (folder / name).write_text(text)
      (folder / name).chmod(0o755)
    whole = a_launch(
      accelerator='gpu', gpus_per_host=8, hosts=2, workdir=str(workdir)
    )
    self.script = slurm.learners_submission(whole, whole.learners, ()).script
    self.process = None

  def start(self):
    self.process = subprocess.Popen(
      ['bash', '-c', self.script],
      env={
        **os.environ,
        'PATH': f'{self.folder}:{os.environ["PATH"]}',
        'FAKES': str(self.folder),
        'DILOCO_HOST': '10.0.0.7',
        'SLURM_JOB_ID': '4711',
        'SLURM_JOB_NODELIST': 'node-[3-4]',
        'SLURM_NNODES': '2',
        'SLURM_ARRAY_TASK_ID': '1',
      },
    )

  def does(self, host, code):
    (self.folder / f'does.{host}').write_text(str(code))

  def pid(self, host):
    path = self.folder / f'pid.{host}'
    until(
      lambda: path.exists() and path.read_text(),
      DEADLINE_S,
      f'a process on node {host}',
    )
    return int(path.read_text())

  def wait(self):
    return self.process.wait(timeout=DEADLINE_S)

  @property
  def is_requeued(self):
    return (self.folder / 'requeues').exists()


@pytest.fixture
def job(tmp_path):
  found = Job(tmp_path)
  yield found
  if found.process and found.process.poll() is None:
    found.process.terminate()
    found.wait()


def test_what_is_submitted(request):
  whole = a_launch(accelerator='gpu', gpus_per_host=8, hosts=2)
  each = slurm.learners_submission(whole, whole.first_learners, ())
  text = f'{json.dumps(each.argv, indent=1)}\n{each.script}'
  rewrite = request.config.getoption('--rewrite')
  check_golden('slurm-first-learner-nodes.txt', text, rewrite)


def test_what_each_node_gets(job):
  job.does(0, 0)
  job.does(1, 0)
  job.start()
  assert job.wait() == 0
  assert not job.is_requeued
  told = [
    json.loads((job.folder / f'argv.{host}').read_text())[-5:]
    for host in (0, 1)
  ]
  coordinator = f'--coordinator=node-3:{61440 + 4711 % 4096}'
  assert told == [
    [
      '--syncer=10.0.0.1:7777',
      '--hosts=2',
      f'--host={host}',
      coordinator,
      '--learner=1',
    ]
    for host in (0, 1)
  ]


@pytest.mark.parametrize('victim', [0, 1])
def test_one_death_is_the_learners(job, victim):
  job.start()
  survivor = psutil.Process(job.pid(1 - victim))
  os.kill(job.pid(victim), signal.SIGKILL)
  assert job.wait() == 0
  assert job.is_requeued
  until(lambda: not _lives(survivor), DEADLINE_S, 'the other is gone')


@pytest.mark.parametrize('refusing', [0, 1])
def test_a_refusal_is_not_lost_among_the_deaths_that_it_causes(job, refusing):
  """`srun` reports 137 alone, of the other node, which was killed."""
  job.does(refusing, 78)
  job.start()
  assert job.wait() == 78
  assert not job.is_requeued


def test_the_notice_reaches_all_and_all_leave(job):
  """A slower node leaves, too: that the others have left does not kill it."""
  job.start()
  for host in (0, 1):
    job.pid(host)
  job.process.send_signal(signal.SIGTERM)
  assert job.wait() == 0
  assert (job.folder / 'left.0').exists()
  assert (job.folder / 'left.1').exists()
  assert job.is_requeued


def _lives(process):
  try:
    return process.status() != psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return False
