# SPDX-License-Identifier: Apache-2.0
"""Slurm: the scripts parse, and do with an exit code what they should."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from launch.backends import slurm
from launch.backends.registry import Slurm
from tests.backends.launch_values import (
  AWKWARD,
  a_large_launch,
  a_launch,
  an_evaluated_launch,
  check_golden,
)
from tests.waiting import until

pytestmark = pytest.mark.beside

# Runs the rest of its command line as `srun` does, on this machine.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
# Stands for Python: writes what it got, then does as it is told.
PYTHON = f"""#!{sys.executable} -IS
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(os.environ['FAKES'])
(folder / 'argv.json').write_text(json.dumps(sys.argv[1:]))
def leave(number, frame):
  (folder / 'told').write_text(str(number))
  sys.exit(143)
signal.signal(signal.SIGTERM, leave)
(folder / 'started').touch()
if os.environ['CODE'] == 'wait':
  signal.pause()
sys.exit(int(os.environ['CODE']))
"""
SCONTROL = """#!/bin/bash
echo "$@" >>"$FAKES/requeues"
"""


def test_the_syncer_gets_what_the_planner_says():
  whole = a_large_launch('gpu', gpus_per_host=8, hosts=4)
  submitted = slurm.syncer_submission(whole, ())
  place = whole.syncer.resources
  assert place.memory_gib > 100
  assert f'--mem={place.memory_gib}G' in submitted.argv
  assert f'--cpus-per-task={place.cpus}' in submitted.argv


def test_the_evaluator_is_in_the_syncers_job():
  whole = an_evaluated_launch(workdir='/shared/runs/first')
  script = slurm.syncer_submission(whole, ()).script
  assert (
    '\nuntil python -m diloco.evaluator --config=experiments/quickstart.py '
    '--workdir=/shared/runs/first --log_json; do sleep 10; done '
    '>>/shared/runs/first/logs/evaluator.log 2>&1 &\n'
  ) in script
  subprocess.run(['bash', '-n'], input=script, text=True, check=True)
  learners = slurm.learners_submission(whole, whole.learners, ())
  assert 'diloco.evaluator' not in learners.script


def test_shards_wait_for_the_syncer_that_leads():
  whole = a_large_launch('gpu', shards=3, gpus_per_host=8, hosts=4)
  called = []

  def act(argv, script):
    called.append((argv, script))
    return '4711' if argv[0] == 'sbatch' else ''

  Slurm(act, ('--partition=a100',), makes_folders=False).start(whole)
  jobs = [each for each in called if each[0][0] == 'sbatch']
  names = [argv[2] for argv, _ in jobs]
  shards = ['--job-name=first-shard-1', '--job-name=first-shard-2']
  assert names == [
    '--job-name=first-syncer',
    *shards,
    '--job-name=first-learner',
  ]
  argv, script = jobs[2]
  assert '--dependency=after:4711,singleton' in argv
  assert f'--mem={whole.syncer.resources.memory_gib}G' in argv
  assert any(each.endswith('/logs/shard-2.log') for each in argv)
  assert 'diloco.syncer_shard' in script and '--shard=2' in script
  assert '--lead=$syncer' in script
  subprocess.run(['bash', '-n'], input=script, text=True, check=True)


@pytest.fixture
def cluster(tmp_path):
  """A folder of stand-ins, and the environment that finds them."""
  for name, text in (
    ('srun', SRUN),
    ('python', PYTHON),
    ('scontrol', SCONTROL),
  ):
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)
  (tmp_path / 'work dir' / 'logs').mkdir(parents=True)
  return tmp_path, {
    **os.environ,
    'PATH': f'{tmp_path}:{os.environ["PATH"]}',
    'FAKES': str(tmp_path),
    'DILOCO_HOST': '10.0.0.7',
    'SLURM_JOB_ID': '4711',
    'SLURM_ARRAY_TASK_ID': '1',
  }


def _launch(folder: pathlib.Path, *arguments, **changes):
  return a_launch(*arguments, workdir=str(folder / 'work dir'), **changes)


def _learner(folder, *arguments, **changes) -> str:
  whole = _launch(folder, *arguments, **changes)
  (folder / 'work dir' / slurm.ADDRESS).write_text('10.0.0.1:7777\n')
  return slurm.learners_submission(whole, whole.learners, ()).script


def _both(whole, given=()) -> tuple[slurm.Submission, slurm.Submission]:
  return (
    slurm.syncer_submission(whole, given),
    slurm.learners_submission(whole, whole.first_learners, given),
  )


def _run(script: str, environment: dict, code: int | str):
  return subprocess.run(
    ['bash'],
    input=script,
    env={**environment, 'CODE': str(code)},
    capture_output=True,
    text=True,
    timeout=240,
  )


def _requeues(folder) -> list[str]:
  path = folder / 'requeues'
  return path.read_text().splitlines() if path.exists() else []


def test_what_is_submitted(request):
  rewrite = request.config.getoption('--rewrite')
  parts = _both(
    a_launch(accelerator='gpu', gpus_per_host=8), ['--partition=a100']
  )
  assert [each.name for each in parts] == ['first-syncer', 'first-learner']
  for each in parts:
    text = f'{json.dumps(each.argv, indent=1)}\n{each.script}'
    check_golden(f'slurm-{each.name}.txt', text, rewrite)


@pytest.mark.parametrize('which', [0, 1])
def test_bash_reads_it(which):
  whole = a_launch(f'--config.data.path={AWKWARD}')
  script = _both(whole)[which].script
  subprocess.run(['bash', '-n'], input=script, text=True, check=True)


@pytest.mark.parametrize('code', [1, 137, 143])
def test_it_goes_back_into_the_queue(cluster, code):
  folder, environment = cluster
  ended = _run(_learner(folder), environment, code)
  assert _requeues(folder) == ['requeue 4711'], ended.stderr


@pytest.mark.parametrize('code', [0, 64, 69, 78])
def test_it_ends(cluster, code):
  folder, environment = cluster
  ended = _run(_learner(folder), environment, code)
  assert ended.returncode == code, ended.stderr
  assert _requeues(folder) == []


def test_restarts_are_used_up(cluster):
  folder, environment = cluster
  script = _learner(folder, restarts_max=3)
  environment['SLURM_RESTART_COUNT'] = '3'
  assert _run(script, environment, 1).returncode == 1
  assert _requeues(folder) == []


def test_a_requeue_that_fails_is_the_process_failure(cluster):
  folder, environment = cluster
  (folder / 'scontrol').write_text('#!/bin/bash\nexit 5\n')
  (folder / 'scontrol').chmod(0o755)
  assert _run(_learner(folder), environment, 9).returncode == 9


def test_what_the_learner_gets(cluster):
  folder, environment = cluster
  script = _learner(folder, f'--config.data.path={AWKWARD}')
  _run(script, environment, 0)
  assert json.loads((folder / 'argv.json').read_text()) == [
    '-m',
    'diloco.learner',
    '--config=experiments/quickstart.py',
    f'--config.data.path={AWKWARD}',
    f'--workdir={folder / "work dir"}',
    '--token_file=/etc/diloco/secret/token',
    '--notice_s=25',
    '--config.transport.host=10.0.0.7',
    '--syncer=10.0.0.1:7777',
    '--learner=1',
  ]


def test_each_learner_of_an_array_serves_metrics_at_its_own_port(cluster):
  folder, environment = cluster
  script = _learner(folder, metrics_port=9100)
  _run(script, {**environment, 'SLURM_ARRAY_TASK_ID': '3'}, 0)
  # The syncer is at 9100, the evaluator at 9101, learner 0 at 9102.
  given = json.loads((folder / 'argv.json').read_text())
  assert [each for each in given if 'metrics' in each] == [
    '--metrics_bind=10.0.0.7:9105', '--metrics_open',
  ]  # fmt: skip


def test_the_syncer_says_where_it_is(cluster):
  folder, environment = cluster
  script = slurm.syncer_submission(_launch(folder), ()).script
  _run(script, environment, 0)
  text = (folder / 'work dir' / slurm.ADDRESS).read_text()
  assert text == '10.0.0.7:7777\n'


@pytest.mark.parametrize(
  'number, requeued', [(signal.SIGTERM, True), (signal.SIGUSR1, False)]
)
def test_a_signal_reaches_the_process(cluster, number, requeued):
  folder, environment = cluster
  script = folder / 'script'
  script.write_text(_learner(folder))
  with subprocess.Popen(
    ['bash', str(script)], env={**environment, 'CODE': 'wait'}
  ) as job:
    _until((folder / 'started').exists)
    job.send_signal(number)
    assert job.wait(timeout=240) == 0
  assert (folder / 'told').read_text() == str(int(signal.SIGTERM))
  assert bool(_requeues(folder)) == requeued


def test_a_signal_before_the_syncer_is_there(cluster):
  folder, environment = cluster
  script = folder / 'script'
  script.write_text(_learner(folder).replace('sleep 5', 'sleep 0.1'))
  (folder / 'work dir' / slurm.ADDRESS).unlink()
  with subprocess.Popen(
    ['bash', '-x', str(script)],
    env={**environment, 'CODE': '0'},
    stderr=subprocess.PIPE,
    text=True,
  ) as job:
    while 'sleep' not in job.stderr.readline():
      pass
    job.send_signal(signal.SIGTERM)
    job.stderr.read()
  assert _requeues(folder) == ['requeue 4711']


def test_who_is_taken_out_of_the_queue():
  listed = '12_0 0 RUNNING\n12_1 1 RUNNING\n15_1 1 PENDING\n'
  assert slurm.cancel_commands(listed, 1) == [
    ('scancel', '--batch', '--signal=USR1', '12_1'),
    ('scancel', '15_1'),
  ]


def test_one_learner_joins():
  whole = a_launch(learners=4)
  one = slurm.learners_submission(whole, whole.learners[3:4], ())
  assert '--array=3' in one.argv


def _until(condition):
  until(condition, 120.0, 'it starts')
