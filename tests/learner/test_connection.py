# SPDX-License-Identifier: Apache-2.0
"""Checks what a learner keeps for a syncer that does not answer."""

import zlib

import numpy as np
import pytest

from diloco.learner.hosts.host_transfer import OFFERS_MAX, HostSessions
from diloco.protocol.host_messages import HostRetire
from diloco.protocol.messages import Payload
from diloco.transport.data_plane import NotOffered
from diloco.transport.memory import MemoryNetwork, MemoryPlane

DATA = np.arange(8, dtype=np.uint8)


def _pull(fetcher, handle):
  payload = Payload(handle, 'int4', DATA.nbytes, zlib.crc32(DATA))
  return fetcher.pull(payload, 1.0)


@pytest.fixture
def ends():
  network = MemoryNetwork()
  sessions = HostSessions(MemoryPlane(network), 1)
  [address] = sessions.open(1)
  return sessions, MemoryPlane(network).fetcher(address)


@pytest.fixture
def full(ends):
  sessions, fetcher = ends
  for handle in range(OFFERS_MAX):
    assert sessions.has_room(1, 0)
    sessions.offer(1, 0, handle, [DATA])
  return sessions, fetcher


def test_offers_of_one_fragment_are_bounded(full):
  sessions, _ = full
  assert not sessions.has_room(1, 0)


def test_what_was_offered_can_still_be_pulled(full):
  _, fetcher = full
  for handle in range(OFFERS_MAX):
    np.testing.assert_array_equal(_pull(fetcher, handle), DATA)


def test_a_retired_offer_makes_room(full):
  sessions, fetcher = full
  sessions.perform(HostRetire(1, (2,)))
  assert sessions.has_room(1, 0)
  with pytest.raises(NotOffered):
    _pull(fetcher, 2)


def test_fragments_do_not_displace_each_other(full):
  sessions, _ = full
  assert sessions.has_room(1, 1)
