# SPDX-License-Identifier: Apache-2.0
"""Wires that delay: pairs of TUN devices whose packets one process carries.

  python -m tests.netbench.delayed_wires PID:DEVICE:PID:DEVICE …

Each argument is a wire between the network namespaces of two processes. Every
packet that one end sends is held for a while and then handed to the other end,
in order; so a wire carries any protocol, where the kernel has no `netem`. Each
line of standard input is a delay in milliseconds, which holds from then on, and
is answered by a line: how many packets have been held so far. The devices, and
what they hold, go with the process, and it goes with its standard input.
"""

import collections
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence

from launch.parent_death import dying_with_parent

CLONE_NEWNET = 0x40000000  # linux/sched.h
TUNSETIFF = 0x400454CA  # linux/if_tun.h
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PACKET_BYTES_MAX = 1 << 16
READS = 64  # Packets of one device before another one has its turn.
HELD_BYTES_MAX = 32 << 20  # Of one direction; what comes beyond is dropped.
READY = 'ready'


class DelayedWires:
  """The process that carries the packets; `close` ends it and its wires.

  Args:
    wires: the two ends of each: a process in the end's namespace, and the name
      of the device that is made there.

  Raises:
    OSError: the wires can't be made; the message has the reason.
  """

  def __init__(self, wires: Sequence[tuple[int, str, int, str]]):
    words = [':'.join(map(str, wire)) for wire in wires]
    module = f'{__package__}.delayed_wires'
    self._process = subprocess.Popen(
      dying_with_parent([sys.executable, '-m', module, *words]),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      process_group=0,  # Ctrl-C in a terminal reaches only the command.
    )
    if self._process.stdout.readline().strip() != READY:
      _, why = self._process.communicate()
      raise OSError(f'delayed wires: {why.strip()[-300:]}')

  def delay(self, delay_ms: float) -> int:
    """Sets the delay of every packet, each way; returns how many were held.

    Raises:
      OSError: the process that carries them has ended.
    """
    print(delay_ms, file=self._process.stdin, flush=True)
    if held := self._process.stdout.readline():
      return int(held)
    raise BrokenPipeError('the process that carries the packets has ended')

  def close(self) -> None:
    """Ends the process; the devices go with it."""
    self._process.kill()
    self._process.communicate()


class _Way:
  """One direction of a wire: what is read at one end is due at the other."""

  def __init__(self, source: int, target: int):
    self.source, self._target = source, target
    self.held = 0  # Packets that had to wait.
    self._queue: collections.deque[tuple[float, bytes]] = collections.deque()
    self._bytes = 0

  def take(self, delay_s: float) -> None:
    """Reads what the end has sent."""
    for _ in range(READS):
      try:
        packet = os.read(self.source, PACKET_BYTES_MAX)
      except BlockingIOError:
        return
      if not delay_s and not self._queue:
        self._hand_over(packet)
      elif self._bytes < HELD_BYTES_MAX:
        self.held += 1
        self._bytes += len(packet)
        self._queue.append((time.monotonic() + delay_s, packet))

  def give(self, now_s: float) -> None:
    """Hands over the packets that are due."""
    while self._queue and self._queue[0][0] <= now_s:
      packet = self._queue.popleft()[1]
      self._bytes -= len(packet)
      self._hand_over(packet)

  @property
  def due_s(self) -> float:
    """Returns when the next packet is due; infinite if none is held."""
    return self._queue[0][0] if self._queue else float('inf')

  def _hand_over(self, packet: bytes) -> None:
    # Where the device is down, or its queue full, the packet is lost.
    with contextlib.suppress(OSError):
      os.write(self._target, packet)


def _open_device(pid: int, name: str) -> int:
  """Returns the descriptor of a new device in the namespace of a process."""
  libc = ctypes.CDLL(None, use_errno=True)
  with open(f'/proc/{pid}/ns/net') as there:
    if libc.setns(there.fileno(), CLONE_NEWNET):
      raise OSError(ctypes.get_errno(), f'setns to {pid}')
  device = os.open('/dev/net/tun', os.O_RDWR | os.O_NONBLOCK)
  request = struct.pack('16sH22x', name.encode(), IFF_TUN | IFF_NO_PI)
  fcntl.ioctl(device, TUNSETIFF, request)
  return device


def _carry(ways: Sequence[_Way]) -> None:
  """Carries packets until standard input ends."""
  by_source = {way.source: way for way in ways}
  delay_s = 0.0
  while True:
    wait_s = min(way.due_s for way in ways) - time.monotonic()
    timeout = None if wait_s == float('inf') else max(0.0, wait_s)
    ready, _, _ = select.select([*by_source, sys.stdin], [], [], timeout)
    for each in ready:
      if each is not sys.stdin:
        by_source[each].take(delay_s)
      elif line := sys.stdin.readline():
        delay_s = float(line) / 1e3
        print(sum(way.held for way in ways), flush=True)
      else:
        return
    now_s = time.monotonic()
    for way in ways:
      way.give(now_s)


def main(wires: Sequence[str]) -> None:
  ways = []
  for wire in wires:
    pid, device, other_pid, other_device = wire.split(':')
    ends = (
      _open_device(int(pid), device),
      _open_device(int(other_pid), other_device),
    )
    ways += [_Way(*ends), _Way(*reversed(ends))]
  print(READY, flush=True)
  _carry(ways)


if __name__ == '__main__':
  main(sys.argv[1:])
