# SPDX-License-Identifier: Apache-2.0
"""Stray bytes on a port of jax_transfer abort its process: it comes back.

Nothing in our code can prevent that abort; it is the library's. What we can do
is to fence the ports, and to survive where a stranger gets through.
"""

import contextlib
import json
import socket
import time

import psutil
import pytest

from diloco.metrics.jsonl import read_jsonl
from tests.processes.processes import ENDLESS, SLOW, START_S, Processes

pytestmark = pytest.mark.soak

STRAY = b'\0\0\0\0'  # A frame of no bytes.
ABORT_S = 60.0
SEND_S = 1.0


@pytest.fixture(scope='module')
def running(tmp_path_factory):
  """Syncer and two learners, which train, under the launcher's supervisor."""
  overrides = (*SLOW, *ENDLESS, 'run.compilation_cache=false')
  with Processes(tmp_path_factory.mktemp('stray'), *overrides) as processes:
    processes.start('launcher', 'launch.local')
    processes.until(processes.pids_left, START_S, 'the launcher starts them')
    for m in (0, 1):
      processes.until_merged(m)
    yield processes


def test_a_learner_aborts_and_is_merged_again(running):
  before = _incarnations(running, 1)
  _abort(running, 'learner-1')
  running.until(
    lambda: max(_incarnations(running, 1)) > max(before),
    START_S,
    'learner 1 is merged again, with a higher incarnation',
  )


def test_the_syncer_aborts_and_comes_back(running):
  learners = {m: len(running.steps(m)) for m in (0, 1)}
  pids = _pids(running)
  _abort(running, 'syncer')
  aborted = len(running.tape('Publish'))
  running.until(
    lambda: all(len(running.steps(m)) >= n + 20 for m, n in learners.items()),
    START_S,
    'the learners train on',
  )
  for m in (0, 1):
    running.until_merged(m)
  rounds = [line['round'] for line in running.tape('Publish')]
  assert len(rounds) > aborted
  assert rounds == sorted(set(rounds)), 'a round was closed twice'
  found = _pids(running)
  assert [found[f'learner-{m}'] for m in (0, 1)] == [
    pids[f'learner-{m}'] for m in (0, 1)
  ]


def _abort(running: Processes, name: str):
  """Sends stray bytes until the process dies and the supervisor has seen it."""
  pid = _pids(running)[name]

  def died():
    return [
      event['detail']
      for event in read_jsonl(running.workdir.events)
      if event['pid'] == pid and event['event'] == 'exited'
    ]

  give_up_s = time.monotonic() + ABORT_S
  while not died() and time.monotonic() < give_up_s:
    for port in _listening(pid):
      with (
        contextlib.suppress(OSError),  # It is dead already, or cut us off.
        socket.create_connection(('127.0.0.1', port), SEND_S) as stray,
      ):
        stray.sendall(STRAY)
        stray.settimeout(SEND_S)
        stray.recv(1)
  # Most abort; bytes that come in the midst of a transfer end in a bad access.
  crashes = [f'died of {name}; restart 1' for name in ('SIGABRT', 'SIGSEGV')]
  assert len(died()) == 1 and died()[0] in crashes, running.tails()
  running.until(
    lambda: _pids(running).get(name, pid) != pid,
    START_S,
    f'{name} is restarted',
  )


def _listening(pid: int) -> list[int]:
  """The ports of the process, with 127.0.0.1 on the other side of it."""
  return sorted(
    found.laddr.port
    for found in psutil.net_connections('tcp')
    if found.pid == pid and found.status == psutil.CONN_LISTEN
  )


def _pids(running: Processes) -> dict[str, int]:
  return json.loads(running.workdir.pids.read_text())['processes']


def _incarnations(running: Processes, learner: int) -> set[int]:
  """Returns the incarnations that were merged so far."""
  return {
    share['incarnation']
    for line in running.merged(learner)
    for share in line['shares']
    if share['learner'] == learner
  }
