# SPDX-License-Identifier: Apache-2.0
"""A relay on loopback through which the processes of a run connect.

Every process opens its connections by `CONNECT` to a port of its own (flag
`--proxy`), so the relay knows both ends: one by that port, the other by its
address, as every learner listens on an address of its own within 127.0.0.0/8.
What a learner sends goes up its link, what it gets comes down it, whichever of
the two has opened the connection.

Each way of a link can be cut, slow, late or lossy, and counts what that did to
the bytes. TCP loses nothing: a packet that is lost comes later, or its
connection ends. So a lossy way stalls some chunks for as long as a kernel waits
before it sends again, and resets the connection at some of them.
"""

import asyncio
import dataclasses
import ipaddress
import random
import threading
from collections.abc import Mapping

from diloco.faults import DOWN, SOUND, UP, WAYS, Impairment

LOOPBACK = '127.0.0.1'
CHUNK_BYTES = 16 << 10
CHUNKS_MAX = 64  # On their way in one direction of a connection.
HEAD_BYTES_MAX = 4096
HEAD_S = 5.0
LOOK_S = 0.02
STALL_S = (0.2, 0.8)  # A retransmission, and one more.
RESET_SHARE = 0.03  # Of the chunks that are lost.
START_S = 10.0


@dataclasses.dataclass
class WayCounts:
  """Counts of what one way has carried and its impairments did."""

  carried_bytes: int = 0
  held_bytes: int = 0  # They waited for a cut to end.
  held_connects: int = 0  # So did these attempts to connect.
  throttled_bytes: int = 0  # They waited for the rate.
  delayed_bytes: int = 0
  stalls: int = 0
  resets: int = 0

  def since(self, before: 'WayCounts') -> dict[str, int]:
    """Returns what was added since `before`, by name."""
    now, then = dataclasses.asdict(self), dataclasses.asdict(before)
    return {name: now[name] - then[name] for name in now}


class Way:
  """One way of one link; lives on the relay's loop.

  Args:
    rng: draws delays and losses.
  """

  def __init__(self, rng: random.Random):
    self.impairment = SOUND
    self.counts = WayCounts()
    self._rng = rng
    self._free_at_s = 0.0  # When a throttled way has carried all it has.

  def draw_delay_s(self, nbytes: int) -> float:
    """Draws the latency of a chunk, and counts it."""
    low_s, high_s = self.impairment.delay_s
    if not high_s:
      return 0.0
    self.counts.delayed_bytes += nbytes
    return self._rng.uniform(low_s, high_s)

  async def opens(self) -> None:
    """Waits until a connection can be opened over this way."""
    if self.impairment.cut:
      self.counts.held_connects += 1
      await self._healed()

  async def carry(self, nbytes: int) -> None:
    """Waits until a chunk is through; raises `ConnectionResetError`."""
    if self.impairment.cut:
      self.counts.held_bytes += nbytes
      await self._healed()
    if self.impairment.bytes_per_s is not None:
      await self._throttle(nbytes, self.impairment.bytes_per_s)
    if self._rng.random() < self.impairment.loss:
      self.counts.stalls += 1
      await asyncio.sleep(self._rng.uniform(*STALL_S))
      if self._rng.random() < RESET_SHARE:
        self.counts.resets += 1
        raise ConnectionResetError('the relay has reset it')
    self.counts.carried_bytes += nbytes

  async def _healed(self) -> None:
    while self.impairment.cut:
      await asyncio.sleep(LOOK_S)

  async def _throttle(self, nbytes: int, bytes_per_s: float) -> None:
    now_s = asyncio.get_running_loop().time()
    self._free_at_s = max(now_s, self._free_at_s) + nbytes / bytes_per_s
    self.counts.throttled_bytes += nbytes
    while self.impairment.bytes_per_s is not None:
      left_s = self._free_at_s - asyncio.get_running_loop().time()
      if left_s <= 0:
        return
      await asyncio.sleep(min(left_s, 0.1))
    self._free_at_s = 0.0


class Relay:
  """The relay of one run, on a thread of its own; use it in a `with` block.

  Args:
    hosts: address on which each process with a link listens, by its name; no
      two are equal.
  """

  def __init__(self, hosts: Mapping[str, str], seed: int):
    assert len(set(hosts.values())) == len(hosts), f'an address twice: {hosts}'
    self._seed = seed
    self._names = {host: name for name, host in hosts.items()}
    self._ways = {
      (name, way): Way(random.Random(f'{seed} {name} {way}'))
      for name in hosts
      for way in WAYS
    }
    self._loop = asyncio.new_event_loop()
    self._servers: list[asyncio.Server] = []
    self._connections: set[asyncio.Task] = set()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name='relay', daemon=True
    )

  def __enter__(self) -> 'Relay':
    self._thread.start()
    return self

  def __exit__(self, *exception) -> None:
    self._call(self._close())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(START_S)
    self._loop.close()

  def listen(self, name: str) -> str:
    """Returns the 'host:port' through which process `name` is to connect."""
    return self._call(self._listen(name))

  def impair(self, name: str, way: str, impairment: Impairment) -> None:
    """Sets what is wrong with a way of a link; `SOUND` heals it."""
    self._ways[name, way].impairment = impairment

  def counts(self, name: str, way: str) -> WayCounts:
    """Returns what this way has counted so far."""
    return dataclasses.replace(self._ways[name, way].counts)

  def _call(self, coroutine):
    future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
    return future.result(START_S)

  async def _listen(self, name: str) -> str:
    async def accept(reader, writer):
      task = asyncio.current_task()
      self._connections.add(task)
      try:
        await self._serve(name, reader, writer)
      finally:
        self._connections.discard(task)

    server = await asyncio.start_server(
      accept, LOOPBACK, 0, limit=HEAD_BYTES_MAX
    )
    self._servers.append(server)
    return f'{LOOPBACK}:{server.sockets[0].getsockname()[1]}'

  async def _close(self) -> None:
    for server in self._servers:
      server.close()
    for task in list(self._connections):
      task.cancel()
    await asyncio.gather(*self._connections, return_exceptions=True)

  async def _serve(self, name: str, reader, writer) -> None:
    """Serves one connection of a process, to its end."""
    other = None
    try:
      asked = await _asked(reader)
      if asked is None:
        await _answer(writer, '400 Bad Request')
        return
      towards, back = self._ways_between(name, self._names.get(asked[0]))
      for way in (*towards, *back):
        await way.opens()
      try:
        other_reader, other = await asyncio.open_connection(*asked)
      except OSError:
        await _answer(writer, '502 Bad Gateway')
        return
      await _answer(writer, '200 OK')
      await _both(
        _carry(reader, other, towards), _carry(other_reader, writer, back)
      )
    except (OSError, asyncio.IncompleteReadError, TimeoutError):
      pass  # One of the two is gone, or the relay has reset them.
    finally:
      for end in (writer, other):
        if end is not None:
          end.transport.abort()

  def _ways_between(
    self, source: str, target: str | None
  ) -> tuple[list[Way], list[Way]]:
    """Returns the ways from one process to another, and those back."""
    ways = self._ways
    towards = [(source, UP), (target, DOWN)]
    back = [(target, UP), (source, DOWN)]
    return (
      [ways[key] for key in towards if key in ways],
      [ways[key] for key in back if key in ways],
    )


async def _asked(reader: asyncio.StreamReader) -> tuple[str, int] | None:
  """Reads where a connection is to lead; None: nowhere that is allowed."""
  try:
    async with asyncio.timeout(HEAD_S):
      head = await reader.readuntil(b'\r\n\r\n')
  except asyncio.LimitOverrunError:
    return None
  method, _, rest = head.decode('latin-1').partition(' ')
  host, _, port = rest.partition(' ')[0].rpartition(':')
  host = host.strip('[]')
  try:
    if method != 'CONNECT' or not ipaddress.ip_address(host).is_loopback:
      return None
    return host, int(port)
  except ValueError:
    return None


async def _answer(writer: asyncio.StreamWriter, status: str) -> None:
  writer.write(f'HTTP/1.1 {status}\r\n\r\n'.encode())
  await writer.drain()


async def _both(*halves) -> None:
  """Runs both to their ends; the first error ends both."""
  tasks = [asyncio.ensure_future(half) for half in halves]
  try:
    await asyncio.gather(*tasks)
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _carry(
  reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ways: list[Way]
) -> None:
  """Carries one direction of a connection, in order, to its end."""
  queue: asyncio.Queue = asyncio.Queue(CHUNKS_MAX)
  # A reset must not wait for what the other end may never say.
  await _both(_receive(queue, reader, ways), _send(queue, writer, ways))


async def _receive(
  queue: asyncio.Queue, reader: asyncio.StreamReader, ways: list[Way]
) -> None:
  now_s = asyncio.get_running_loop().time
  data = b'...'
  while data:
    data = await reader.read(CHUNK_BYTES)
    due_s = now_s() + sum(way.draw_delay_s(len(data)) for way in ways)
    await queue.put((due_s, data))


async def _send(
  queue: asyncio.Queue, writer: asyncio.StreamWriter, ways: list[Way]
) -> None:
  now_s = asyncio.get_running_loop().time
  while True:
    due_s, data = await queue.get()
    if (early_s := due_s - now_s()) > 0:
      await asyncio.sleep(early_s)
    for way in ways:
      await way.carry(len(data))
    if not data:
      writer.write_eof()
      return
    writer.write(data)
    await writer.drain()
