# SPDX-License-Identifier: Apache-2.0
"""The inbox of the machine: a source that sends too much waits, no other."""

import threading

import pytest

from diloco.run.threads import Inbox
from tests.waiting import until

pytestmark = pytest.mark.beside

SHARE, MANY = 4, 100
WAIT_S = 60.0


@pytest.fixture
def flooded():
  """An inbox that 'loud' keeps telling things, and the thread that does so."""
  inbox = Inbox(items_max=64, share_max=SHARE)
  loud = threading.Thread(
    target=lambda: [inbox.tell_from('loud', ('loud', n)) for n in range(MANY)]
  )
  loud.start()
  until(lambda: inbox.qsize() >= SHARE, WAIT_S, 'its share is full')
  yield inbox, loud
  inbox.close()
  loud.join()


def test_inbox_one_source_fills_its_share_and_no_more(flooded):
  inbox, loud = flooded
  loud.join(0.1)
  assert loud.is_alive()
  assert inbox.qsize() == SHARE


def test_inbox_others_wait_behind_one_share_at_most(flooded):
  inbox, _ = flooded
  inbox.tell_from('calm', ('calm', 0))
  before = 0
  while inbox.get(timeout=WAIT_S)[0] == 'loud':
    inbox.was_read('loud')
    before += 1
  assert before <= SHARE


def test_inbox_loses_nothing_and_keeps_the_order(flooded):
  inbox, loud = flooded
  read = []
  for _ in range(MANY):
    read.append(inbox.get(timeout=WAIT_S)[1])
    inbox.was_read('loud')
  assert read == list(range(MANY))
  loud.join(WAIT_S)
  assert inbox.empty()


def test_inbox_that_is_closed_lets_everybody_go(flooded):
  inbox, loud = flooded
  inbox.close()
  loud.join(WAIT_S)
  assert not loud.is_alive()
