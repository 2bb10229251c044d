# SPDX-License-Identifier: Apache-2.0
"""A synchronous run loses a session half-way; its folder is opened again."""

import dataclasses
import queue
import shutil
import socket
import threading

import pytest

from diloco.checkpoint.arrays import BrokenRecord
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import Workdir
from diloco.protocol import messages
from diloco.protocol.syncer import events as syncer_events
from diloco.syncer.server import SyncerServer
from diloco.syncer.storage import SyncerDisk
from diloco.transport.memory import MemoryNetwork, MemoryPlane
from launch.preflight import free_address
from tests.in_process.in_process import LEARNERS, Run
from tests.transport.faulty import Faults

pytestmark = pytest.mark.beside

DEADLINE_S = 120.0
AT_ONCE_S = 60.0  # With results to write, on a machine that is busy.
CUT_ROUND = 5
AGAIN = 10  # Rounds at the end, in which all are there again.


@pytest.fixture(scope='module')
def cut(tmp_path_factory):
  """A synchronous run that cuts learner 1 off as it waits at its boundary."""
  run = Run(
    tmp_path_factory.mktemp('cut'),
    Faults(),
    step_floor_s=0.02,  # The other goes on alone until it is back.
    quorum=2,
    total_steps=400,
    overlap_steps=0,
    fragments=1,
    sync_every_steps=4,
  )
  peers, note_event = run.syncing._peers, run.syncing._stats.note_event

  def cut_off(event):
    note_event(event)
    match event:
      case syncer_events.Heard(1, _, messages.Offer(round=round_)):
        if round_ == CUT_ROUND and not was_cut.is_set():
          was_cut.set()
          key = event.learner, event.incarnation
          peers[key].session.close('cut off by the test')

  was_cut = threading.Event()
  run.syncing._stats.note_event = cut_off
  run.finish()
  assert was_cut.is_set()
  return run


def test_a_waiting_learner_that_is_cut_off_goes_on(cut):
  """The machine waits no longer, and no effect tells the loop so."""
  shares = [
    merge['shares']
    for merge in read_jsonl(cut.workdir.tape)
    if merge['kind'] == 'Merge' and merge['round'] > CUT_ROUND
  ]
  assert len(shares) > AGAIN
  # It is back after some rounds of the other alone.
  assert all(len(each) == LEARNERS for each in shares[-AGAIN:])


def test_a_run_with_a_cut_ends_in_good_order(cut):
  assert [left.reason for left in cut.left] == ['run is over'] * LEARNERS


def test_an_ended_run_is_not_run_again(cut, tmp_path):
  """A syncer that died after the last close still writes the results."""
  shutil.copytree(cut.workdir.syncer, Workdir(tmp_path).syncer)
  plane = MemoryPlane(MemoryNetwork())
  syncing = SyncerServer(cut.run_spec, '127.0.0.1:0', plane, Workdir(tmp_path))
  ended = queue.SimpleQueue()
  thread = threading.Thread(target=lambda: ended.put(syncing.run()))
  thread.start()
  thread.join(AT_ONCE_S)
  at_once = not thread.is_alive()
  syncing.stop()
  thread.join(DEADLINE_S)
  syncing.close()
  plane.close()
  assert at_once
  assert ended.get(timeout=DEADLINE_S)
  assert Workdir(tmp_path).summary.exists()
  assert any(Workdir(tmp_path).parameters.iterdir())


def test_the_folder_of_another_run_is_not_gone_on_with(cut, monkeypatch):
  """Learners could connect meanwhile, and afterwards the port is free."""
  inner = dataclasses.replace(cut.run_spec.config.inner, lr=0.5)
  config = dataclasses.replace(cut.run_spec.config, inner=inner)
  another = dataclasses.replace(cut.run_spec, config=config)
  plane = MemoryPlane(MemoryNetwork())
  address = free_address('127.0.0.1', 0)
  connected, begin = [], SyncerDisk.begin

  def connect():
    connection = socket.create_connection(address.split(':'))
    connected.append(connection)
    connection.close()

  def begin_later(disk):
    connect()
    return begin(disk)

  monkeypatch.setattr(SyncerDisk, 'begin', begin_later)
  with pytest.raises(BrokenRecord, match=r'inner\.lr: 0\.5 here'):
    SyncerServer(another, address, plane, cut.workdir)
  with pytest.raises(ConnectionRefusedError):
    connect()
  assert len(connected) == 1
