# SPDX-License-Identifier: Apache-2.0
"""Slurm's scripts with what they are for: a real syncer and a real learner."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from diloco.config import run_config
from diloco.metrics.status import read_summary
from diloco.metrics.workdir import Workdir
from diloco.transport.sockets import free_port
from experiments import tests_tiny
from launch.backends import slurm
from launch.job import JobSpec, launch
from tests.backends.launch_values import asked

pytestmark = pytest.mark.beside

STEPS = 20
DEADLINE_S = 300.0  # On a machine that others work on too.
HERE = pathlib.Path(__file__).parent
SRUN = f'#!/bin/sh\nexec {sys.executable} -IS {HERE}/fake_srun.py "$@"\n'
SCONTROL = """#!/bin/bash
case $1 in
  show) echo 127.0.0.1 ;;
  requeue) echo "$2" >>"$FAKES/requeues" ;;
esac
"""


def _whole(folder, port: int, hosts: int) -> JobSpec:
  text = f'steps={STEPS},learners=1'
  given = tests_tiny.get_config(text)
  given.transport.data_plane = 'grpc'
  given.mesh.fsdp = hosts  # A node has one device here.
  return launch(
    run_config.build(given),
    [
      f'--config=experiments/tests_tiny.py:{text}',
      '--config.transport.data_plane=grpc',
      f'--config.mesh.fsdp={hosts}',
    ],
    'tests_tiny.py',
    '',
    ['--log_json'],
    asked(workdir=str(folder), port=port, python=sys.executable, hosts=hosts),
  )


@pytest.mark.parametrize(
  'hosts', [pytest.param(1, marks=pytest.mark.soak), 2]
)
def test_a_run_comes_to_its_end(tmp_path, hosts):
  for name, text in (('srun', SRUN), ('scontrol', SCONTROL)):
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)
  workdir = Workdir(tmp_path / 'run')
  workdir.log('x').parent.mkdir(parents=True)
  port = free_port()
  whole = _whole(workdir.root, port, hosts)
  learners = slurm.learners_submission(whole, whole.first_learners, ()).script
  scripts = {
    'syncer': slurm.syncer_submission(whole, ()).script,
    'learner-0': learners,
  }
  jobs = {}
  try:
    for job_id, (name, script) in enumerate(scripts.items(), start=4711):
      with workdir.log(name).open('w') as log:
        jobs[name] = subprocess.Popen(
          ['bash', '-c', script.replace('sleep 5', 'sleep 0.1')],
          env={
            **os.environ,
            'PATH': f'{tmp_path}:{os.environ["PATH"]}',
            'FAKES': str(tmp_path),
            'DILOCO_HOST': '127.0.0.1',
            'SLURM_JOB_ID': str(job_id),
            'SLURM_JOB_NODELIST': 'all',
            'SLURM_NNODES': '1' if name == 'syncer' else str(hosts),
            'SLURM_ARRAY_TASK_ID': name[-1],
          },
          stdout=log,
          stderr=subprocess.STDOUT,
        )
    for name, job in jobs.items():
      assert job.wait(timeout=DEADLINE_S) == 0, workdir.log(name).read_text()
  finally:
    for job in jobs.values():
      job.terminate()
      job.wait()
  assert not (tmp_path / 'requeues').exists()
  assert read_summary(workdir.summary).step >= STEPS
  _check_said(workdir, 'syncer', {'role': 'syncer'}, 'run tests-tiny: ')
  for host in range(hosts):
    who = {'role': 'learner', 'learner': 0, 'host': host}
    _check_said(workdir, 'learner-0', who, 'left: ')


def _check_said(workdir, name, who, message):
  """A record names its process; libraries in C++ write lines of their own."""
  lines = workdir.log(name).read_text().splitlines()
  records = [json.loads(line) for line in lines if line.startswith('{')]
  said = [each for each in records if each['message'].startswith(message)]
  assert any({**each, **who, 'run': 'tests-tiny'} == each for each in said)
