# SPDX-License-Identifier: Apache-2.0
"""Peers that break the protocol lose their session, and harm no other."""

import dataclasses
import json
import math
import queue
import random
import statistics
import threading
import time

import psutil
import pytest

from diloco.metrics import status
from diloco.protocol import messages
from diloco.syncer import results, server
from tests import waiting
from tests.siege import malice
from tests.syncer.spoken import DEADLINE_S, REPORT, Stage, small_run_spec

pytestmark = pytest.mark.beside

FLOOD = 2_000  # 31 times a session's share of the inbox; 100,000 passed.
GROWN_MAX = 64 << 20
CLOSE_S = 60.0  # Time-outs of about 3 s, on a machine that is busy.


# Reports ---------------------------------------------------------------------


def test_a_diverged_loss_is_told_as_none(small_run, tmp_path, monkeypatch):
  """NaN is no JSON: it must not end the syncer that writes the status."""
  written = queue.SimpleQueue()

  def write_status(path, status):
    write(path, status)
    written.put(status)

  write = status.write_status
  monkeypatch.setattr(results, 'write_status', write_status)
  stage = Stage(small_run, tmp_path)
  stage.start()
  try:
    stage.peer(0).join().say(dataclasses.replace(REPORT, loss=math.nan))
    told = written.get(timeout=DEADLINE_S)
    while not (told.learners and told.learners[0].step):
      told = written.get(timeout=DEADLINE_S)
    found = json.loads(
      stage.workdir.status.read_text(), parse_constant=_no_constant
    )
    assert found['learners'][0]['loss'] is None
    stage.assert_lives()
  finally:
    stage.close()


def _no_constant(name: str):
  raise AssertionError(f'{name} is no JSON')


@pytest.mark.parametrize(
  'changes',
  [
    {'stall_s': 0.2, 'step_s': 0.1},
    {'tokens': -1},
    {'step': 3},
    {'step_s': -1.0, 'stall_s': -1.0},
    {'rows': -1},
  ],
  ids=lambda changes: ','.join(changes),
)
def test_an_impossible_report_ends_the_session(stage, changes):
  peer = stage.peer(0).join()
  second = {'step': 2, 'rows': 2, **changes}
  peer.say(REPORT, dataclasses.replace(REPORT, **second))
  assert 'impossible report' in peer.end()
  stage.assert_lives()


@pytest.mark.parametrize('seed', range(4))
def test_any_figures_harm_nobody(stage, seed):
  """Messages that the wire lets through, with the strangest values in them."""
  rng = random.Random(seed)
  stage.close_a_round()
  good = stage.peer(0).join()
  for incarnation in range(1, 31):
    bad = stage.peer(1, incarnation)
    bad.say_hello()
    bad.say(messages.Ready(0, 'the test'), REPORT)
    for _ in range(10):
      bad.say(malice.extreme(rng.choice(messages.FROM_LEARNER), rng))
    bad.close()
  good.train(stage.run_spec.config.protocol.spacing_steps)
  good.offer(2, 1e-3)
  assert 0 in good.hear(messages.Update).participants
  shown = status.as_json(stage.syncing._stats.status(False))
  told = json.loads(json.dumps(shown, allow_nan=False))
  assert told['learners'][0]['state'] == 'live'
  assert told['refused'] > 0
  stage.assert_lives()


# Hellos ----------------------------------------------------------------------


def test_many_fingerprints_are_refused_in_short(stage):
  """Naming 20 000 keys would not fit the message that says so."""
  extra = {f'key-{i}': '0' for i in range(20_000)}
  peer = stage.peer(0)
  peer.say_hello(fingerprints={**stage.run_spec.fingerprints, **extra})
  refusal = peer.hear(messages.Refusal)
  assert refusal.final
  assert len(refusal.reason) <= 1100
  stage.assert_lives()


def test_a_long_run_name_is_refused_in_short(stage):
  peer = stage.peer(0)
  peer.say_hello(run='x' * 300_000)
  assert len(peer.hear(messages.Refusal).reason) <= 1100
  stage.assert_lives()


def test_a_session_can_not_be_taken_over(stage):
  """A second session that says it were the first is refused."""
  first = stage.peer(0).join()
  second = stage.peer(0)
  second.say_hello()
  assert 'another session' in second.hear(messages.Refusal).reason
  second.end()
  first.say(messages.WantFragment(0, 'still here'))
  assert first.hear(messages.FullFragment).fragment == 0
  stage.assert_lives()


def test_an_address_of_no_use_ends_the_session(stage):
  """Messages right after such a hello meet a session without a fetcher."""
  peer = stage.peer(0)
  peer.say_hello(addresses=('nonsense',))
  peer.say(messages.Ready(0, 'the test'), REPORT)
  peer.offer(1, 1e-3)
  assert 'nonsense' in peer.end()
  stage.assert_lives()


@pytest.mark.parametrize('beyond', [0, 1000])
def test_an_id_without_a_shard_is_refused(stage, beyond):
  shards = stage.run_spec.config.data.shards
  peer = stage.peer(shards + beyond)
  peer.say_hello()
  refusal = peer.hear(messages.Refusal)
  assert refusal.final
  assert f'must be in 0 … {shards - 1}' in refusal.reason
  stage.assert_lives()


@pytest.mark.parametrize(
  'partition', ['nonsense', '[]', '[[["fsdp",1]],[0],{}]']
)
def test_a_partition_of_other_parameters_reaches_no_donor(stage, partition):
  """A donor would have to read it, on the thread of its steps."""
  donor, bad = stage.peer(0).join(), stage.peer(1)
  donor.train(1)
  bad.say_hello(partition=partition)
  bad.say(messages.WantState('the test'))
  assert bad.hear(messages.Refusal).final
  stage.peer(2).join()
  donor.say(messages.Goodbye('the test'))
  donor.end()
  assert not [x for x in donor.heard() if isinstance(x, messages.Donate)]
  stage.assert_lives()


# Contributions ---------------------------------------------------------------


@pytest.mark.parametrize('codec', ['f32', 'int4'])
def test_huge_values_are_not_merged(codec, tmp_path):
  """3e38 is finite; the sum of two is not. The rounds of others close."""
  stage = Stage(small_run_spec(up=codec), tmp_path)
  stage.start()
  try:
    good, bad = stage.peer(0).join(), stage.peer(1).join()
    spacing_steps = stage.run_spec.config.protocol.spacing_steps
    bad.train(spacing_steps)
    for attempt in range(1, 4):
      bad.offer(1, 3e38)
      if attempt < 3:
        assert 'Unusable: ' in bad.hear(messages.OfferAgain).reason
    assert '3 contributions refused, the last: Unusable: ' in bad.end()
    good.train(spacing_steps)
    good.offer(1, 1e-3)
    assert good.hear(messages.Update).participants == (0,)
    stage.assert_lives()
  finally:
    stage.close()


# Floods ----------------------------------------------------------------------


def test_a_flood_of_reports_delays_nobody(tmp_path):
  """Another session is answered beside valid but too many reports.

  What is unread stays bounded. K = 2: one alone can't drive the run on.
  """
  stage = Stage(small_run_spec(quorum=2), tmp_path)
  stage.start()
  inbox, said = stage.syncing._inbox, threading.Event()
  try:
    good, flooder = stage.peer(0).join(), stage.peer(1)
    rss_before = psutil.Process().memory_info().rss
    flooding = threading.Thread(target=flooder.flood, args=(FLOOD, said))
    flooding.start()
    answers_s, behind, unread = [], [], 0
    while not said.wait(0.02):
      began_s, read = time.monotonic(), stage.steps_of(1)
      good.say(messages.WantFragment(0, 'beside a flood', len(answers_s)))
      good.hear(messages.FullFragment)
      answers_s.append(time.monotonic() - began_s)
      behind.append(stage.steps_of(1) - read)
      unread = max(unread, inbox.qsize())
    flooding.join()
    grown = psutil.Process().memory_info().rss - rss_before
    print(
      f'{len(answers_s)} answers, median {statistics.median(answers_s):.4f} s, '
      f'slowest {max(answers_s):.3f} s, behind a median of '
      f'{statistics.median(behind)} reports, {max(behind)} at most; {unread=}, '
      f'{grown >> 20} MiB grown'
    )
    # Its stream ends once all is received; the machine reads on.
    all_read = lambda: stage.steps_of(1) == FLOOD  # noqa: E731
    waiting.until(all_read, DEADLINE_S, f'all of {FLOOD} reports')
    assert unread <= 2 * server.SHARE_MAX
    # Counted, since seconds are longer on a busy machine.
    assert statistics.median(behind) <= 2 * server.SHARE_MAX
    assert grown < GROWN_MAX
    stage.assert_lives()
  finally:
    stage.close()


# The syncer's own end --------------------------------------------------------


def test_a_full_inbox_does_not_hold_up_the_end(
  small_run, tmp_path, monkeypatch
):
  """The machine has left, or never ran; the sessions' threads put and put."""
  monkeypatch.setattr(server, 'INBOX_MAX', 8)
  stage = Stage(small_run, tmp_path)
  for learner in range(4):
    peer = stage.peer(learner)
    peer.say_hello()
    peer.train(200)
  inbox = stage.syncing._inbox
  with inbox.not_empty:  # Told at each put.
    assert inbox.not_empty.wait_for(
      lambda: inbox._qsize() == inbox.maxsize, DEADLINE_S
    )
  closing = threading.Thread(target=stage.syncing.close)
  closing.start()
  closing.join(CLOSE_S)
  in_time = not closing.is_alive()
  while closing.is_alive():  # Let them go, or the test would never end.
    inbox.queue.clear()
    with inbox.not_full:
      inbox.not_full.notify_all()
    closing.join(0.1)
  stage.close()
  assert in_time, f'still closing after {CLOSE_S} s'
