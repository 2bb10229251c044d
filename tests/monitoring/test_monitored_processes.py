# SPDX-License-Identifier: Apache-2.0
"""Each process of a local run serves its metrics where the launcher said."""

import http.client
import json
import re
import socket
import urllib.request

import pytest

from diloco.transport.sockets import free_port
from tests.processes.processes import EXIT_CONFIG, START_S, Processes
from tests.survival.survival import BOWL

pytestmark = pytest.mark.beside
NAMES = ['syncer', 'evaluator', 'shard-1', 'learner-0', 'learner-1']


def get(port: int, path: str) -> str:
  try:
    url = f'http://127.0.0.1:{port}/{path}'
    with urllib.request.urlopen(url, timeout=60.0) as answer:
      return answer.read().decode()
  except (OSError, http.client.HTTPException):  # It is slow, or not there.
    return ''


def test_every_process_of_a_run(tmp_path):
  with Processes(
    tmp_path,
    *BOWL,
    'protocol.total_steps=100000',
    'syncer.shards=2',
    'run.eval_every_rounds=8',
    'run.step_floor_s=0.1',
    'run.log_every_steps=1',
    'checkpoint.syncer_every_rounds=8',
  ) as processes:
    first = free_port(count=len(NAMES))
    launcher = processes.start(
      'launcher', 'launch.local', f'--metrics_port={first}'
    )
    ports = dict(zip(NAMES, range(first, first + len(NAMES)), strict=True))

    def tells(name: str, pattern: str) -> bool:
      text = get(ports[name], 'metrics')
      found = re.search(pattern, text) is not None
      return found and 'process_resident_memory_bytes' in text

    def status(name: str) -> dict:
      return json.loads(get(ports[name], 'status') or '{}')

    def steps(name: str) -> bool:
      told = status(name)
      return told.get('process') == name and told['step'] > 0

    for name, pattern in (
      ('learner-0', r'diloco_train_loss\{process="learner-0",'),
      ('learner-1', r'diloco_perf_step_s\{process="learner-1",'),
      ('evaluator', r'diloco_eval_loss\{process="evaluator",'),
      ('shard-1', r'diloco_shard_closed_round\{process="shard-1",.*\} [1-9]'),
      ('syncer', r'diloco_learner_loss\{learner="1",'),
    ):
      processes.until(
        lambda name=name, pattern=pattern: tells(name, pattern),
        START_S,
        f'{name} tells {pattern}',
      )
    processes.until(
      lambda: status('syncer').get('rounds', 0) > 0,
      START_S,
      'the status of the syncer',
    )
    processes.until(
      lambda: steps('learner-1'), START_S, 'the status of learner-1'
    )
    said = f'learner-1 {ports["learner-1"]}'
    assert said in ' '.join(launcher.output.split())


def test_a_port_that_is_taken_is_named_before_anything_starts(tmp_path):
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    with Processes(tmp_path) as processes:
      launcher = processes.start(
        'launcher', 'launch.local', f'--metrics_port={port}'
      )
      assert processes.exit_code(launcher) == EXIT_CONFIG
    (error,) = launcher.errors
    assert f'--metrics_port: port {port} of syncer: Address already' in error
