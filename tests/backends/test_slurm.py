# SPDX-License-Identifier: Apache-2.0
"""Slurm: what the scripts do when a job is told, dies, or comes to its end."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from diloco.config import run_config
from diloco.metrics.status import read_summary
from diloco.metrics.workdir import Workdir
from diloco.transport.sockets import free_port
from experiments import tests_tiny
from launch.backends import slurm
from launch.backends.slurm import Slurm
from launch.job import JobOptions, launch
from tests.backends.launch_values import (
  ASKED,
  a_config,
  a_launch,
  a_sliced_launch,
  check_golden,
)
from tests.backends.machines import SCONTROL, SRUN, SlurmNode, hurried
from tests.waiting import until

pytestmark = pytest.mark.beside

STEPS = 20
DEADLINE_S = 300.0  # On a machine that others work on too.


@pytest.fixture
def node(tmp_path):
  return SlurmNode(tmp_path)


def launched(node, **changes):
  return a_launch(workdir=str(node.workdir), **changes)


@pytest.fixture
def job(node):
  """Starts the job of a learner of two nodes; ends what is left of it."""
  whole, started = launched(node, **node.several), []

  def start():
    started.append(node.job(whole, whole.learners[1]))
    return started[0]

  yield start
  for each in started:
    if each.poll() is None:
      each.terminate()
      each.wait(timeout=DEADLINE_S)


def test_what_is_submitted(request):
  whole = a_launch(
    accelerator='gpu', gpus_per_host=8, hosts=2, workdir='/shared/runs/first'
  )
  argv, script = Slurm().learners(whole, whole.first_learners)
  text = f'{json.dumps(argv, indent=1)}\n{script}'
  rewrite = request.config.getoption('--rewrite')
  check_golden('slurm-first-learner-nodes.txt', text, rewrite)


def test_what_is_submitted_of_a_learner_of_several_slices(request):
  whole = a_sliced_launch(
    accelerator='gpu', gpus_per_host=8, hosts=4, workdir='/shared/runs/first'
  )
  (learner,) = whole.learners[:1]
  backend = Slurm()
  calls = [
    *(backend.call(whole, met) for met in whole.rendezvous_of(learner)),
    backend.learners(whole, [learner]),
  ]
  text = '\n'.join(
    # What stands below is the same in all.
    f'{json.dumps(argv, indent=1)}\n{script.partition("# SPDX")[0]}'
    for argv, script in calls
  )
  rewrite = request.config.getoption('--rewrite')
  check_golden('slurm-first-learner-slices.txt', text, rewrite)
  listed = '12_0 0 RUNNING\n12_1 1 PENDING\n13 N/A RUNNING\n'
  assert [argv[-1] for argv in slurm.cancel_commands(listed, learner)] == [
    '12_0', '12_1', '13',
  ]  # fmt: skip


def test_shards_and_learners_wait_for_the_syncer():
  called = []

  def run(argv, script):
    called.append(argv)
    subprocess.run(['bash', '-n'], input=script, text=True, check=True)
    return '4711;cluster' if argv[0] == 'sbatch' else ''

  whole = a_launch(shards=2, learners=4, workdir='/tmp')
  backend = Slurm(run=run, sbatch=('--partition=a100',))
  assert backend.start(whole) == backend.add(whole, 3) == 0
  jobs = [argv for argv in called if argv[0] == 'sbatch']
  assert [argv[-2] for argv in jobs] == [
    '--dependency=singleton', '--dependency=after:4711,singleton',
    '--dependency=after:4711', '--array=3',
  ]  # fmt: skip
  assert {argv[-1] for argv in jobs} == {'--partition=a100'}


def test_learners_of_one_kind_are_one_array():
  text = (
    '1: sbatch=--partition=b,c --gpus-per-node=l4:2, gpus_per_host=2, '
    'mesh.fsdp=2, data.batch=2'
  )
  whole = a_launch(
    config=a_config(8, 3, unlike_learners=text),
    accelerator='gpu',
    gpus_per_host=8,
    metrics_port=9100,
  )
  calls = []
  backend = Slurm(
    run=lambda *call: calls.append(call) or '', sbatch=('--partition=a',)
  )
  backend.start(dataclasses.replace(whole, workdir='/tmp'))
  (alike, first), (other, second) = calls[-2:]
  assert {'--array=0,2', '--gpus-per-node=8'} <= {*alike}
  assert alike[-1] == '--partition=a'
  assert {'--array=1', '--gpus-per-node=2'} <= {*other}
  # Of what is given twice sbatch takes the last.
  assert other[-3:] == (
    '--partition=a', '--partition=b,c', '--gpus-per-node=l4:2',
  )  # fmt: skip
  assert '--config.data.batch=2 --config.mesh.fsdp=2' in second
  assert '--config.data.batch=2' not in first
  assert '$((9102 + $SLURM_ARRAY_TASK_ID))' in first
  assert '$((9102 + $SLURM_ARRAY_TASK_ID))' in second


def test_who_is_taken_out_of_the_queue():
  listed = '12_0 0 RUNNING\n12_1 1 RUNNING\n15_1 1 PENDING\n'
  assert slurm.cancel_commands(listed, a_launch().learners[1]) == [
    ('scancel', '--batch', '--signal=USR1', '12_1'),
    ('scancel', '15_1'),
  ]


def test_a_requeue_that_fails_is_the_process_failure(node):
  node.programs(scontrol='#!/bin/bash\nexit 5\n')
  node.does(9)
  whole = launched(node)
  job = node.job(whole, whole.learners[1])
  assert job.wait(timeout=DEADLINE_S) == 9


def test_the_syncer_says_where_it_is(node):
  whole = launched(node)
  node.processes(whole, whole.syncer)
  assert (node.workdir / 'logs/syncer.address').read_text() == '10.0.0.7:7777\n'


@pytest.mark.parametrize(
  'number, requeued', [(signal.SIGTERM, True), (signal.SIGUSR1, False)]
)
def test_a_signal_reaches_the_process(node, number, requeued):
  whole = launched(node)
  job = node.job(whole, whole.learners[1])
  node.pid(0)
  job.send_signal(number)
  assert job.wait(timeout=DEADLINE_S) == 0
  assert (node.folder / 'left.0').exists()
  assert bool(node.requeues()) == requeued


def test_a_signal_before_the_syncer_is_there(node):
  (node.workdir / 'logs/syncer.address').unlink()
  node.programs(sleep='#!/bin/bash\ntouch $FAKES/waits; exec /bin/sleep $1\n')
  whole = launched(node)
  job = node.job(whole, whole.learners[1])
  until((node.folder / 'waits').exists, DEADLINE_S, 'it waits')
  job.send_signal(signal.SIGTERM)
  assert job.wait(timeout=DEADLINE_S) == 0
  assert node.requeues() == ['4711']


# A learner of several nodes starts, leaves and dies as one.


@pytest.mark.parametrize('victim', [0, 1])
def test_one_death_is_the_learners(node, job, victim):
  started = job()
  survivor = psutil.Process(node.pid(1 - victim))
  os.kill(node.pid(victim), signal.SIGKILL)
  assert started.wait(timeout=DEADLINE_S) == 0
  assert node.requeues()
  until(lambda: not _lives(survivor), DEADLINE_S, 'the other is gone')


@pytest.mark.parametrize('refusing', [0, 1])
def test_a_refusal_is_not_lost_among_the_deaths_that_it_causes(
  node, job, refusing
):
  """`srun` reports 137 alone, of the other node, which was killed."""
  node.does(78, refusing)
  assert job().wait(timeout=DEADLINE_S) == 78
  assert not node.requeues()


def test_the_notice_reaches_all_and_all_leave(node, job):
  """A slower node leaves, too: that the others have left does not kill it."""
  started = job()
  for host in (0, 1):
    node.pid(host)
  started.send_signal(signal.SIGTERM)
  assert started.wait(timeout=DEADLINE_S) == 0
  assert (node.folder / 'left.0').exists()
  assert (node.folder / 'left.1').exists()
  assert node.requeues()


def _lives(process):
  try:
    return process.status() != psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return False


# The scripts with what they are for: a real syncer and a real learner.


@pytest.mark.soak
@pytest.mark.parametrize(('hosts', 'slices'), [(1, 1), (2, 1), (1, 2)])
def test_a_run_comes_to_its_end(tmp_path, hosts, slices):
  """A learner of so many slices of so many hosts."""
  for name, text in (('srun', SRUN), ('scontrol', SCONTROL)):
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)
  workdir = Workdir(tmp_path / 'run')
  workdir.log('x').parent.mkdir(parents=True)
  text = f'steps={STEPS},learners=1'
  given = tests_tiny.get_config(text)
  given.transport.data_plane = 'grpc'
  given.mesh.fsdp = hosts  # A node has one device here.
  given.mesh.slices = slices
  keys = {
    'transport.data_plane': 'grpc',
    'mesh.fsdp': hosts,
    'mesh.slices': slices,
  }
  options = {
    **ASKED,
    'workdir': str(workdir.root),
    'port': free_port(),
    'python': sys.executable,
    'hosts': hosts * slices,
  }
  whole = launch(
    run_config.build(given),
    [
      f'--config=experiments/tests_tiny.py:{text}',
      *(f'--config.{key}={value}' for key, value in keys.items()),
    ],
    ('tests_tiny.py', ''),
    [],
    ['--log_json'],
    JobOptions(**options),
  )
  backend, jobs = Slurm(), {}
  (learner,) = whole.first_learners
  calls = {'syncer': backend.syncer(whole)}
  for met in whole.rendezvous_of(learner):
    calls[met.name] = backend.call(whole, met)
  for each in whole.slices_of(learner):
    calls[each.name] = backend.learners(whole, [learner])
  try:
    for job_id, (name, (_, script)) in enumerate(calls.items(), start=4711):
      with workdir.log(name).open('w') as log:
        jobs[name] = subprocess.Popen(
          ['bash', '-c', hurried(script)],
          env={
            **os.environ,
            'PATH': f'{tmp_path}:{os.environ["PATH"]}',
            'FAKES': str(tmp_path),
            'NODES': '127.0.0.1',
            'DILOCO_HOST': '127.0.0.1',
            'SLURM_JOB_ID': str(job_id),
            'SLURM_JOB_NODELIST': 'all',
            'SLURM_NNODES': str(hosts) if name[-1].isdecimal() else '1',
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
  for host in range(hosts) if slices == 1 else ():
    who = {'role': 'learner', 'learner': 0, 'host': host}
    _check_said(workdir, 'learner-0', who, 'left: ')


def _check_said(workdir, name, who, message):
  """A record names its process; libraries in C++ write lines of their own."""
  lines = workdir.log(name).read_text().splitlines()
  records = [json.loads(line) for line in lines if line.startswith('{')]
  said = [each for each in records if each['message'].startswith(message)]
  assert any({**each, **who, 'run': 'tests-tiny'} == each for each in said)
