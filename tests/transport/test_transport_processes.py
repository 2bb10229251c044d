# SPDX-License-Identifier: Apache-2.0
"""Both real data planes against real processes that are killed, stopped and
continued. Every case ends within its deadline."""

import contextlib
import ctypes
import dataclasses
import gc
import os
import pathlib
import threading
import time
import zlib
from collections.abc import Callable

import numpy as np
import pytest

from diloco.protocol import messages
from diloco.transport import data_plane, jax_transfer, planes
from diloco.transport import sockets as transport_sockets
from tests.transport.peer_process import Process
from tests.waiting import until

pytestmark = pytest.mark.beside
# Of what is to be met in its middle, or before a time-out.
measures_time = pytest.mark.alone

WAIT_S = 60.0
AT_ONCE_S = WAIT_S / 2  # Of what takes less than a second: it does not hang.
TRANSFER_S = 5.0  # More than `MIDDLE` takes.
TRIES = 5  # To meet a transfer in its middle.
BIG = 200 << 20  # Long enough to be met in the middle.
MIDDLE = 8 << 20


class Pull(threading.Thread):
  """A pull on a thread of its own, its outcome and how long it took."""

  def __init__(self, fetcher, payload, timeout_s):
    super().__init__()
    self._arguments = (fetcher, payload, timeout_s)
    self.outcome = None
    self.start()

  def run(self):
    fetcher, payload, timeout_s = self._arguments
    started = time.monotonic()
    try:
      self.outcome = fetcher.pull(payload, timeout_s).nbytes
    except data_plane.TransferFailed as error:
      self.outcome = type(error)
    self.took_s = time.monotonic() - started

  def wait(self):
    self.join(3 * WAIT_S)
    assert not self.is_alive(), 'the pull hangs'
    return self.outcome


class TheirPull:
  """A pull that the process makes."""

  def __init__(self, process: Process, publisher, payload):
    self._process = process
    process.pull(publisher, payload, timeout_s=WAIT_S)

  def wait(self):
    return self._process.answer()


@pytest.fixture(params=['jax_transfer', 'grpc'])
def kind(request):
  return request.param


@pytest.fixture
def plane(kind):
  with contextlib.closing(planes.make_plane(kind, '127.0.0.1')) as made:
    yield made


@pytest.fixture
def process(kind):
  with contextlib.closing(Process(kind)) as made:
    yield made


def offered(publisher, handle: int, nbytes: int) -> messages.Payload:
  data = np.random.default_rng(handle).integers(0, 256, nbytes, np.uint8)
  publisher.offer(handle, data)
  return messages.Payload(handle, 'raw', nbytes, zlib.crc32(data))


def stop_in_the_middle(
  process: Process, direction: str, begin: Callable[[int], Pull | TheirPull]
) -> Pull | TheirPull:
  """Stops the process once some of a big payload has passed, but far from all.

  Where it is too late for one, the next is begun.

  Args:
    begin: the transfer of `BIG` bytes under this handle.
  """
  for handle in range(1, TRIES + 1):
    sockets = transport_sockets.SocketMeter()
    pull = begin(handle)
    passed = lambda of=sockets: getattr(of.sample(), direction)  # noqa: E731
    deadline = time.monotonic() + WAIT_S
    while passed() < MIDDLE:
      assert time.monotonic() < deadline, f'{passed()} bytes passed'
    process.stop()
    if passed() < BIG * 3 // 4:
      return pull
    process.go_on()
    assert pull.wait() == BIG
  pytest.fail(f'{TRIES} times too late')


def test_processes_exchange_both_ways(plane, process):
  fetcher = plane.fetcher(process.ask(do='publisher'))
  payload = process.offer(1, 5 << 20)
  assert fetcher.pull(payload, WAIT_S).nbytes == 5 << 20
  publisher = plane.publisher('child')
  process.pull(publisher, offered(publisher, 1, 5 << 20), timeout_s=WAIT_S)
  assert process.answer() == 5 << 20


@measures_time
def test_processes_peer_killed_before_a_pull(plane, process):
  fetcher = plane.fetcher(process.ask(do='publisher'))
  first, second = process.offer(1, 1000), process.offer(2, 1000)
  other = plane.fetcher(process.ask(do='publisher'))  # Never connected.
  fetcher_after = plane.fetcher(process.ask(do='publisher'))
  third = process.offer(3, 1000)
  fetcher_after.pull(third, WAIT_S)
  process.kill()
  assert Pull(fetcher, first, WAIT_S).wait() is data_plane.Unreachable
  assert Pull(other, second, WAIT_S).wait() is data_plane.Unreachable
  connected = Pull(fetcher_after, third, WAIT_S)
  assert connected.wait() in (data_plane.PeerLost, data_plane.Unreachable)
  assert connected.took_s < AT_ONCE_S


@measures_time
def test_processes_peer_killed_during_a_pull(plane, process):
  fetcher = plane.fetcher(process.ask(do='publisher'))
  pull = stop_in_the_middle(
    process,
    'received',
    lambda handle: Pull(fetcher, process.offer(handle, BIG), WAIT_S),
  )
  process.kill()
  killed = time.monotonic()
  assert pull.wait() is data_plane.PeerLost
  assert time.monotonic() - killed < AT_ONCE_S


@measures_time
def test_processes_peer_stopped_before_a_pull(plane, process):
  fetcher = plane.fetcher(process.ask(do='publisher'))
  payload, again = process.offer(1, 1000), process.offer(2, 1000)
  process.stop()
  pull = Pull(fetcher, payload, 0.5)
  assert pull.wait() is data_plane.TimedOut
  assert pull.took_s < AT_ONCE_S
  process.go_on()
  assert fetcher.pull(again, WAIT_S).nbytes == 1000


@measures_time
def test_processes_peer_stopped_during_a_pull(plane, process):
  fetcher = plane.fetcher(process.ask(do='publisher'))
  again = process.offer(TRIES + 1, 1000)
  pull = stop_in_the_middle(
    process,
    'received',
    lambda handle: Pull(fetcher, process.offer(handle, BIG), TRANSFER_S),
  )
  assert pull.wait() is data_plane.TimedOut
  assert pull.took_s < TRANSFER_S + AT_ONCE_S
  process.go_on()
  assert fetcher.pull(again, WAIT_S).nbytes == 1000


@measures_time
def test_processes_close_unblocks_a_pull_from_a_stopped_peer(plane, process):
  fetcher = plane.fetcher(process.ask(do='publisher'))
  pull = stop_in_the_middle(
    process,
    'received',
    lambda handle: Pull(fetcher, process.offer(handle, BIG), 2 * WAIT_S),
  )
  fetcher.close()
  closed = time.monotonic()
  assert pull.wait() is data_plane.Closed
  assert time.monotonic() - closed < AT_ONCE_S


@measures_time
def test_processes_a_stopped_puller_delays_nobody(plane, process, kind):
  stalled, healthy = plane.publisher('stalled'), plane.publisher('healthy')
  with contextlib.closing(Process(kind)) as other:
    pull = stop_in_the_middle(
      process,
      'sent',
      lambda handle: TheirPull(process, stalled, offered(stalled, handle, BIG)),
    )
    for handle in range(4):
      payload = offered(healthy, handle, 4 << 20)
      other.pull(healthy, payload, timeout_s=AT_ONCE_S)
      assert other.answer() == 4 << 20
    started = time.monotonic()
    stalled.close()
    assert time.monotonic() - started < AT_ONCE_S
    process.go_on()
    assert pull.wait() == 'PeerLost'


@measures_time
def test_processes_a_killed_puller_frees_what_it_held(plane, process, kind):
  publisher = plane.publisher('killed')
  handles = []

  def begin(handle: int) -> TheirPull:
    handles.append(handle)
    return TheirPull(process, publisher, offered(publisher, handle, BIG))

  stop_in_the_middle(process, 'sent', begin)
  process.kill()
  publisher.retire(handles[-1])
  with contextlib.closing(Process(kind)) as other:
    payload = offered(publisher, TRIES + 1, 1000)
    other.pull(publisher, payload, timeout_s=WAIT_S)
    assert other.answer() == 1000


@measures_time
def test_processes_dead_address(plane, process):
  address = process.ask(do='publisher').replace('127.0.0.1', 'localhost')
  process.kill()
  pull = Pull(plane.fetcher(address), messages.Payload(1, 'raw', 1, 0), WAIT_S)
  assert pull.wait() is data_plane.Unreachable
  assert pull.took_s < AT_ONCE_S


def usage() -> tuple[int, int, int]:
  """Descriptors, threads, resident MiB."""
  gc.collect()
  ctypes.CDLL(None).malloc_trim(0)  # Else freed arenas of glibc count.
  pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
  return (
    len(os.listdir('/proc/self/fd')),
    len(os.listdir('/proc/self/task')),
    pages * os.sysconf('SC_PAGE_SIZE') >> 20,
  )


@pytest.mark.soak
def test_processes_twenty_cycles_leak_nothing(plane, kind, monkeypatch):
  # A server whose loop is late is kept, and would look like a leak.
  monkeypatch.setattr(jax_transfer, 'CLOSE_S', WAIT_S)
  nbytes = 4 << 20
  before = None
  process = Process(kind)
  try:
    for cycle in range(20):
      if cycle == 5:  # What is allocated once, is by now.
        before = usage()
      publisher = plane.publisher('child')
      fetcher = plane.fetcher(process.ask(do='publisher'))
      handle = 10 * cycle
      assert (
        fetcher.pull(process.offer(handle, nbytes), WAIT_S).nbytes == nbytes
      )
      process.pull(
        publisher, offered(publisher, handle, nbytes), timeout_s=WAIT_S
      )
      assert process.answer() == nbytes
      payload = process.offer(handle + 1, nbytes)
      offered(publisher, handle + 1, nbytes)  # Never pulled.
      match cycle % 5:
        case 0:
          outcome = Pull(
            fetcher, dataclasses.replace(payload, nbytes=9), WAIT_S
          )
          assert outcome.wait() is data_plane.WrongSize
        case 1:
          outcome = Pull(
            fetcher, dataclasses.replace(payload, handle=handle + 2), 0.1
          )
          assert outcome.wait() in (data_plane.TimedOut, data_plane.NotOffered)
        case 2:
          process.stop()
          assert Pull(fetcher, payload, 0.1).wait() is data_plane.TimedOut
          process.go_on()
        case 3:
          process.ask(do='publisher')  # Closes the one that is pulled from.
          outcome = Pull(fetcher, payload, WAIT_S).wait()
          assert outcome in (data_plane.PeerLost, data_plane.Unreachable)
        case 4 if cycle % 10 == 4:
          process.close()
          outcome = Pull(fetcher, payload, WAIT_S).wait()
          assert outcome in (data_plane.PeerLost, data_plane.Unreachable)
          process = Process(kind)
      publisher.close()
      fetcher.close()
    until(
      lambda: all(
        now <= then + more
        for now, then, more in zip(usage(), before, (2, 2, 48))
      ),
      2 * WAIT_S,
      lambda: f'{usage()=}, after 5: {before=}',
      look_every_s=0.1,
    )
  finally:
    process.close()
