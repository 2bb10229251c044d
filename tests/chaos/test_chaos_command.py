# SPDX-License-Identifier: Apache-2.0
"""The command: bad use, what it leaves when killed, a run of three minutes."""

import contextlib
import json
import subprocess
import sys
import time
import zlib

import numpy as np
import psutil
import pytest

from diloco.config import run_config
from diloco.faults import UP
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import Workdir
from diloco.protocol.messages import Payload
from diloco.transport import auth
from diloco.transport.grpc_transfer import GrpcPlane
from experiments import tests_tiny
from launch.chaos import stage
from launch.chaos.clock import sitecustomize
from launch.chaos.relay import Relay
from launch.chaos.stage import Clocks, LiveRun
from launch.program import Processes
from tests.commands import listening, output, refused
from tests.waiting import until

pytestmark = pytest.mark.alone

CONFIG = '--config=experiments/tests_tiny.py:learners=3'
SLOW = '--config.run.step_floor_s=0.05'
START_S = 240.0


def command(*words):
  return [sys.executable, '-m', 'launch.chaos', *words]


@pytest.mark.parametrize(
  ('words', 'said'),
  [
    (('--workdir=W',), '--config: is missing, such as --config=experiments/'),
    ((CONFIG,), '--workdir: is missing'),
    (
      (CONFIG, '--workdir=W', '--kinds=quake'),
      '--kinds=quake: real processes perform kill, ',
    ),
    (
      (CONFIG, '--workdir=W', '--kinds=kill_host'),
      '--kinds=kill_host: no process of this run can be hit',
    ),
    (
      (CONFIG, '--workdir=W', '--faults_per_hour=9000'),
      '--faults_per_hour=9000: 450 faults in 3 minutes do not fit',
    ),
    ((CONFIG, '--workdir=W', '--minutes=0'), '--minutes=0: must be above 0'),
    (
      (CONFIG, '--workdir=W', '--config.transport.host=0.0.0.0'),
      'transport.host=0.0.0.0: a run of faults stays on loopback',
    ),
  ],
)
def test_bad_use_gets_one_clear_line(tmp_path, words, said):
  words = [word.replace('=W', f'={tmp_path / "run"}') for word in words]
  [line] = refused('-m', 'launch.chaos', *words)
  assert line.startswith(f'error: {said}')
  assert not (tmp_path / 'run').exists()


def test_the_data_plane_goes_through_the_relay():
  host = '127.0.1.1'
  data = np.arange(1000, dtype=np.uint8)
  payload = Payload(1, 'int4', data.nbytes, crc=zlib.crc32(data))
  with Relay({'learner-0': host}, seed=0) as relay:
    access = auth.Access(proxy=relay.listen('syncer'))
    learner, syncer = GrpcPlane(host), GrpcPlane('127.0.0.1', access=access)
    try:
      publisher = learner.publisher('syncer')
      publisher.offer(1, data)
      found = syncer.fetcher(publisher.address).pull(payload, timeout_s=10.0)
      np.testing.assert_array_equal(found, data)
      assert relay.counts('learner-0', UP).carried_bytes >= data.nbytes
    finally:
      syncer.close()
      learner.close()


def test_a_newcomer_has_the_devices_of_a_single_host(tmp_path):
  """Issue: beside learners of several hosts it ended with exit code 78."""
  config = run_config.build(tests_tiny.get_config())
  two, one = Processes(2, (('X', '1'),)), Processes(1, (('X', '2'),))
  with Relay(stage.hosts_of(config), seed=0) as relay:
    for learners in ((two, one), (one, two)):
      run = LiveRun(
        *(config, [], Workdir(tmp_path)),
        learners=learners,
        connected=lambda role: stage.connected(
          role, config, relay, Clocks(tmp_path), True
        ),
      )
      found = run.newcomer(2)
      assert (found.name, found.hosts) == ('learner-2', 1)
      assert ('X', '2') in found.environment
      assert '--config.transport.host=127.0.1.3' in found.argv


def test_a_clock_is_set_from_outside(tmp_path):
  clocks = Clocks(tmp_path)
  environment = dict(clocks.environment('learner-0'))
  clocks.set('learner-0', -3600.0)
  code = 'import time; print(time.time(), time.time_ns(), time.monotonic())'
  told = output('-c', code, **environment).split()
  seconds, nanoseconds, monotonic = map(float, told)
  assert seconds == pytest.approx(time.time(), abs=30.0)
  assert nanoseconds / 1e9 - seconds == pytest.approx(-3600.0, abs=1.0)
  assert monotonic == pytest.approx(time.monotonic(), abs=30.0)
  assert sitecustomize.VARIABLE in environment


def test_a_killed_command_takes_its_processes_along(tmp_path):
  root = tmp_path / 'run'
  with (tmp_path / 'out').open('w') as out:
    running = subprocess.Popen(
      command(CONFIG, SLOW, f'--workdir={root}', '--faults_per_hour=0'),
      stdout=out,
      stderr=out,
    )
    try:
      until(
        lambda: len(started(root)) >= 4 or running.poll() is not None,
        START_S,
        'its processes are started',
      )
      processes = [psutil.Process(pid) for pid in started(root)]
    finally:
      running.kill()
      running.wait()
  said = (tmp_path / 'out').read_text()
  assert len(processes) >= 4, said
  assert 'it takes about 4 minutes' in ' '.join(said.split())
  until(
    lambda: not any(each.is_running() for each in processes),
    30.0,
    'all its processes are gone',
  )


def started(root):
  """Pids of the processes that a run has started."""
  path = Workdir(root).events
  events = read_jsonl(path) if path.exists() else []
  return [x['pid'] for x in events if x['event'] == 'started']


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_run_of_three_minutes_holds(tmp_path):
  """Every kind of fault once, on two shards and a learner of two hosts; its
  verdict, and that of the simulation.
  """
  root = tmp_path / 'run'
  out = tmp_path / 'out'
  elsewhere = []
  with out.open('w') as file:
    running = subprocess.Popen(
      command(
        '--config=experiments/tests_tiny.py:learners=4',
        '--config.run.step_floor_s=0.2',
        '--config.mesh.fsdp=2',
        '--config.syncer.shards=2',
        '--hosts=2,1,1,1',
        '--cpu_devices',
        f'--workdir={root}',
        '--seed=34',  # Kills the syncer, and stops a shard.
        '--minutes=3',
        '--faults_per_hour=280',
      ),
      stdout=file,
      stderr=file,
    )
    while running.poll() is None:
      for pid in (running.pid, *started(root)):
        with contextlib.suppress(psutil.NoSuchProcess):
          elsewhere += [x for x in listening(pid) if x[:4] != '127.']
      time.sleep(1.0)
  said = out.read_text()
  assert running.returncode == 0, said
  assert not elsewhere, 'they listen beyond loopback'
  verdict = json.loads((root / 'chaos' / 'verdict.json').read_text())
  assert verdict['holds'], said
  assert abs(verdict['goodput'] - verdict['simulated_goodput']) <= 0.05
  assert len({x['kind'] for x in verdict['outcomes']}) == 14
  assert not any(map(psutil.pid_exists, started(root)))
