# SPDX-License-Identifier: Apache-2.0
"""What a learner keeps for a syncer that does not answer."""

import zlib

import numpy as np
import pytest

from diloco.protocol.messages import Payload
from diloco.runtime.link import OFFERS_KEPT, Session
from diloco.transport.interface import NotOffered
from diloco.transport.memory import MemoryNetwork, MemoryPlane

DATA = np.arange(8, dtype=np.uint8)


def _pull(inlet, handle):
  payload = Payload(handle, 'int4', DATA.nbytes, zlib.crc32(DATA))
  return inlet.pull(payload, 1.0)


@pytest.fixture
def ends():
  network = MemoryNetwork()
  outlet = MemoryPlane(network).outlet('syncer')
  return Session(1, None, outlet), MemoryPlane(network).inlet(outlet.address)


def test_offers_of_one_fragment_are_bounded(ends):
  session, inlet = ends
  for handle in range(OFFERS_KEPT + 1):
    session.offer(0, handle, DATA)
  with pytest.raises(NotOffered):
    _pull(inlet, 0)


def test_the_newest_offers_stay(ends):
  session, inlet = ends
  for handle in range(3 * OFFERS_KEPT):
    session.offer(0, handle, DATA)
  for handle in range(2 * OFFERS_KEPT, 3 * OFFERS_KEPT):
    np.testing.assert_array_equal(_pull(inlet, handle), DATA)


def test_fragments_do_not_displace_each_other(ends):
  session, inlet = ends
  session.offer(1, 100, DATA)
  for handle in range(2 * OFFERS_KEPT):
    session.offer(0, handle, DATA)
  np.testing.assert_array_equal(_pull(inlet, 100), DATA)
