# SPDX-License-Identifier: Apache-2.0
"""The contract of a data plane, within one process: all planes pass it."""

import contextlib
import dataclasses
import functools
import re
import socket
import threading
import time
import zlib

import numpy as np
import pytest

from diloco.protocol.messages import Payload
from diloco.transport import data_plane, jax_transfer, planes, sockets

pytestmark = pytest.mark.beside

SEED = 7
WAIT_S = 60.0
SHORT_S = 0.3
LATE_BYTES = 1 << 20
# jax.experimental.transfer does not say that a handle is unknown; it waits.
UNKNOWN = {
  'memory': data_plane.NotOffered,
  'grpc': data_plane.NotOffered,
  'jax_transfer': data_plane.TimedOut,
}
# Where a pull of an unknown handle waits; on the others one waits only for a
# stopped peer, which `test_transport_processes` has.
WAITING = ['jax_transfer']


class Pair:
  """Two planes; one offers to the other."""

  def __init__(self, kind: str):
    self.unknown = UNKNOWN[kind]
    # A pull of an unknown handle: its time-out, or a deadline for the answer.
    waits = self.unknown is data_plane.TimedOut
    self.unknown_s = SHORT_S if waits else WAIT_S
    self.theirs = planes.make_plane(kind, '127.0.0.1')
    self.ours = planes.make_plane(kind, '127.0.0.1')
    self.publisher = self.theirs.publisher('us')
    self.fetcher = self.ours.fetcher(self.publisher.address)
    self._rng = np.random.default_rng(SEED)

  def offer(self, handle: int, nbytes: int) -> tuple[Payload, np.ndarray]:
    data = self._rng.integers(0, 256, nbytes, dtype=np.uint8)
    self.publisher.offer(handle, data)
    return Payload(handle, 'raw', nbytes, zlib.crc32(data)), data

  def close(self):
    self.ours.close()
    self.theirs.close()


@pytest.fixture(params=UNKNOWN)
def pair(request):
  with contextlib.closing(Pair(request.param)) as made:
    yield made


@pytest.mark.parametrize('nbytes', [1, 4096, (1 << 20) + 1, 9 << 20])
def test_contract_the_bytes_arrive(pair, nbytes):
  payload, data = pair.offer((1 << 60) - 1, nbytes)  # The largest handle.
  got = pair.fetcher.pull(payload, WAIT_S)
  assert got.dtype == np.uint8
  assert got.ndim == 1
  np.testing.assert_array_equal(got, data)


def test_contract_an_offer_can_be_pulled_once(pair):
  payload, _ = pair.offer(1, 100)
  pair.fetcher.pull(payload, WAIT_S)
  with pytest.raises(pair.unknown):
    pair.fetcher.pull(payload, pair.unknown_s)


def test_contract_a_pull_that_failed_has_used_the_offer_up(pair):
  payload, _ = pair.offer(1, 100)
  with pytest.raises(data_plane.Corrupt, match='crc'):
    pair.fetcher.pull(dataclasses.replace(payload, crc=1), WAIT_S)
  with pytest.raises(pair.unknown):
    pair.fetcher.pull(payload, pair.unknown_s)


def test_contract_a_handle_that_was_never_offered(pair):
  pair.offer(1, 100)
  started = time.monotonic()
  with pytest.raises(pair.unknown):
    pair.fetcher.pull(Payload(2, 'raw', 100, 0), pair.unknown_s)
  assert time.monotonic() - started < WAIT_S


def test_contract_a_retired_handle_is_gone_at_once(pair):
  payload, _ = pair.offer(1, 100)
  pair.publisher.retire(1)
  pair.publisher.retire(1)
  with pytest.raises(data_plane.NotOffered):
    pair.fetcher.pull(payload, WAIT_S)


def test_contract_a_handle_in_use_cannot_be_offered_again(pair):
  payload, data = pair.offer(1, 100)
  with pytest.raises(ValueError, match='handle 1 is in use'):
    pair.publisher.offer(1, np.zeros(5, np.uint8))
  np.testing.assert_array_equal(pair.fetcher.pull(payload, WAIT_S), data)
  pair.publisher.retire(1)
  payload, data = pair.offer(1, 200)
  np.testing.assert_array_equal(pair.fetcher.pull(payload, WAIT_S), data)


@pytest.mark.parametrize(
  'data',
  [
    np.zeros(0, np.uint8),
    np.zeros(8, np.int8),
    np.zeros((2, 4), np.uint8),
    np.zeros(8, np.uint8)[::2],
  ],
  ids=['empty', 'int8', '2-D', 'strided'],
)
def test_contract_only_flat_bytes_can_be_offered(pair, data):
  with pytest.raises(ValueError, match='offer 1: '):
    pair.publisher.offer(1, data)


@pytest.mark.parametrize(
  ('offered', 'announced'),
  [
    (1000, 999),
    (1000, 2000),
    (1000, 0),
    (1000, -1),
    (1000, 1 << 50),
    # Whole chunks: the library below jax_transfer takes them for the whole.
    (20 << 20, 12 << 20),
    (12 << 20, 20 << 20),
  ],
)
def test_contract_a_wrong_size_is_named(pair, offered, announced):
  payload, _ = pair.offer(1, offered)
  with pytest.raises(data_plane.WrongSize, match=f'announced.*{announced}'):
    pair.fetcher.pull(dataclasses.replace(payload, nbytes=announced), WAIT_S)


def test_contract_a_flipped_byte_is_found(pair):
  payload, data = pair.offer(1, 5 << 20)
  flipped = data.copy()
  flipped[3 << 20] ^= 1
  announced = dataclasses.replace(payload, crc=zlib.crc32(flipped))
  with pytest.raises(data_plane.Corrupt, match=f'{announced.crc:#010x}'):
    pair.fetcher.pull(announced, WAIT_S)


@pytest.mark.parametrize('pair', WAITING, indirect=True)
def test_contract_pulls_of_one_fetcher_do_not_wait_for_each_other(pair):
  ended = []

  def stall():
    with pytest.raises(data_plane.Closed):
      pair.fetcher.pull(Payload(99, 'raw', 100, 0), 2 * WAIT_S)
    ended.append('closed')

  stalled = threading.Thread(target=stall)
  stalled.start()
  payload, data = pair.offer(1, 1 << 20)
  np.testing.assert_array_equal(pair.fetcher.pull(payload, WAIT_S), data)
  assert not ended
  pair.fetcher.close()
  stalled.join(WAIT_S)
  assert ended == ['closed']


def test_contract_one_peer_cannot_pull_the_offers_of_another(pair):
  other = pair.theirs.publisher('somebody else')
  payload, _ = pair.offer(1, 100)
  with pytest.raises(pair.unknown):
    pair.ours.fetcher(other.address).pull(payload, pair.unknown_s)


def test_contract_publishers_have_handles_of_their_own(pair):
  other = pair.theirs.publisher('somebody else')
  payload, data = pair.offer(1, 100)
  other.offer(1, np.ones(100, np.uint8))
  np.testing.assert_array_equal(pair.fetcher.pull(payload, WAIT_S), data)


def test_contract_a_closed_publisher_is_closed(pair):
  payload, _ = pair.offer(1, 100)
  pair.fetcher.pull(payload, WAIT_S)
  pair.publisher.close()
  pair.publisher.close()
  pair.publisher.retire(1)
  with pytest.raises((data_plane.Unreachable, data_plane.PeerLost)):
    pair.fetcher.pull(payload, WAIT_S)
  with pytest.raises(data_plane.Unreachable):
    pair.fetcher.pull(payload, WAIT_S)
  with pytest.raises(data_plane.Closed):
    pair.publisher.offer(2, np.ones(1, np.uint8))


def test_contract_a_closed_fetcher_is_closed(pair):
  payload, _ = pair.offer(1, 100)
  pair.fetcher.close()
  pair.fetcher.close()
  with pytest.raises(data_plane.Closed):
    pair.fetcher.pull(payload, WAIT_S)


def test_contract_a_closed_plane_has_closed_its_ends(pair):
  payload, _ = pair.offer(1, 100)
  pair.theirs.close()
  with pytest.raises((data_plane.Unreachable, data_plane.PeerLost)):
    pair.fetcher.pull(payload, WAIT_S)
  pair.ours.close()
  with pytest.raises(data_plane.Closed):
    pair.fetcher.pull(payload, WAIT_S)


def test_a_publisher_closes_once_its_puller_has_connected(monkeypatch):
  """Refused by the port for the bytes, jaxlib aborts the puller's process."""
  monkeypatch.setattr(jax_transfer, 'HANDSHAKE_S', WAIT_S)
  plane = jax_transfer.JaxTransferPlane(sockets.LOOPBACK)
  publisher = plane.publisher('us')
  port = sockets.parse_publisher(publisher.address, 'jax_transfer').port
  greeting = b'\x1a\x11\x12\x0f127.0.0.1:12345'
  with socket.create_connection((sockets.LOOPBACK, port), WAIT_S) as puller:
    puller.sendall(len(greeting).to_bytes(4, 'little') + greeting)
    # The answer names the port that the bytes are to come from.
    [bulk] = re.findall(rb'127\.0\.0\.1:(\d+)', puller.recv(1000))
    closing = threading.Thread(target=plane.close)
    closing.start()
    closing.join(SHORT_S)
    assert closing.is_alive()
    with socket.create_connection((sockets.LOOPBACK, int(bulk)), WAIT_S):
      closing.join(WAIT_S)
  assert not closing.is_alive()
  with pytest.raises(ConnectionRefusedError):
    sockets.probe(sockets.LOOPBACK, int(bulk), WAIT_S)


def test_contract_many_threads_pull_at_once(pair):
  offers = [pair.offer(handle, 1 << 18) for handle in range(32)]
  wrong = []

  def work(mine):
    for payload, data in mine:
      if not np.array_equal(pair.fetcher.pull(payload, WAIT_S), data):
        wrong.append(payload)

  workers = [
    threading.Thread(target=work, args=(offers[start::4],))
    for start in range(4)
  ]
  for worker in workers:
    worker.start()
  for worker in workers:
    worker.join()
  assert wrong == []


def test_contract_late_offers_are_made_as_they_are_pulled(pair, monkeypatch):
  """In order, each once, and few of them ahead; a withdrawn one is none."""
  monkeypatch.setattr(jax_transfer, 'AHEAD_BYTES_MAX', LATE_BYTES)
  made = []

  def make(i: int) -> np.ndarray:
    made.append(i)
    return np.full(LATE_BYTES, i, np.uint8)

  for i in range(8):
    pair.publisher.offer(i, functools.partial(make, i))
  for i in range(7):
    data = np.full(LATE_BYTES, i, np.uint8)
    payload = Payload(i, 'raw', LATE_BYTES, zlib.crc32(data))
    got = pair.fetcher.pull(payload, WAIT_S)
    np.testing.assert_array_equal(got, data)
    assert len(made) <= i + 3
  assert made[:7] == [*range(7)]

  def over():
    raise data_plane.NotOffered('it is over')

  pair.publisher.offer(9, over)
  with pytest.raises(pair.unknown):
    pair.fetcher.pull(Payload(9, 'raw', 1, 0), pair.unknown_s)


def test_contract_one_late_offer_that_fails_does_not_end_the_others(pair):
  def broken():
    raise RuntimeError('it can not be made')

  data = np.arange(5, dtype=np.uint8)
  pair.publisher.offer(1, broken)
  pair.publisher.offer(2, lambda: data)
  got = pair.fetcher.pull(Payload(2, 'raw', 5, zlib.crc32(data)), WAIT_S)
  np.testing.assert_array_equal(got, data)
