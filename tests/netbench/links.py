# SPDX-License-Identifier: Apache-2.0
"""Network namespaces joined by links of a given rate; Linux, as root.

Every member has a namespace of its own, with one link to a router; the kernel's
token bucket (`tc … tbf`) limits both directions of each link. A namespace is
held by a process that dies with this one, and has no name: however this process
ends, the kernel removes the namespaces, and the links with them. The addresses
are of a range for documentation (RFC 5737), and no route leads out of it.
"""

import contextlib
import ctypes
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from launch.parent_death import dying_with_parent
from launch.preflight import free_address
from tests.netbench.delayed_wires import CLONE_NEWNET, DelayedWires

MEMBERS_MAX = 60  # Four addresses each, of one range of 256.
ADDRESS = '198.51.100.{}'
PORT = 7700  # Of the syncer or the coordinator: every port there is free.
TOOLS = ('ip', 'tc', 'unshare', 'nsenter', 'sleep')
START_S = 10.0
BUCKET_BYTES_MIN = 8 << 10  # A few frames: what passes at once, unshaped,
BUCKET_S = 0.004  # or what the link carries in this time.
QUEUE_BYTES_MIN = 64 << 10  # What waits at a link before a frame is dropped,
QUEUE_S = 0.1  # or what the link carries in this time.
PROBE_BYTES = 64 << 10
PROBES = 5
_REPLACE = ('tc', 'qdisc', 'replace', 'dev')


class LinksFailed(Exception):
  """The links could not be made, or do not carry what they should."""


def why_not_here() -> str | None:
  """Returns why this machine can't have such links; None: it can."""
  if sys.platform != 'linux':
    return 'needs Linux: network namespaces'
  if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
    return (
      f'needs {", ".join(missing)}, of the packages iproute2 and util-linux'
    )
  if os.geteuid() != 0:
    return (
      'needs root, to make network namespaces: sudo, or a container of yours'
    )
  with (
    contextlib.suppress(LinksFailed, OSError),
    ShapedLinks(['probe']) as links,
  ):
    links.shape(1.0)
    return None
  return 'this kernel makes no namespace, no veth or no tbf for this user'


class Loopback:
  """The place of runs without links: everything is at 127.0.0.1."""

  def __init__(self):
    self.port = int(free_address('127.0.0.1', 0).rpartition(':')[2])

  def __enter__(self) -> 'Loopback':
    return self

  def __exit__(self, *exception) -> None:
    pass

  def address(self, member: str) -> str:
    """Returns the address on which the member listens."""
    del member
    return '127.0.0.1'

  def inside(self, member: str) -> list[str]:
    """Returns the words before a command: none."""
    del member
    return []


class ShapedLinks:
  """The namespaces of members; a `with` block removes them at its end.

  Args:
    members: their names.
    delays: True if `shape` can delay, too: links are then wires whose packets a
      process carries, some ten thousand a second.
  """

  port = PORT

  def __init__(self, members: Sequence[str], delays: bool = False):
    assert len(members) <= MEMBERS_MAX, members
    self._delays = delays
    self._wires: DelayedWires | None = None
    self._numbers = {name: k for k, name in enumerate(members)}
    self._holders: dict[str, subprocess.Popen] = {}

  def __enter__(self) -> 'ShapedLinks':
    try:
      for name in (*self._routers(), *self._numbers):
        self._holders[name] = _hold()
      for holder in self._holders.values():
        _until_apart(holder)
      for router in self._routers():
        self._command(router, 'sysctl', '-qw', 'net.ipv4.ip_forward=1')
      self._connect_all()
    except BaseException:
      self.__exit__()
      raise
    return self

  def __exit__(self, *exception) -> None:
    if self._wires is not None:
      self._wires.close()
    for holder in self._holders.values():
      holder.kill()
      holder.wait()

  def address(self, member: str) -> str:
    """Returns the address on which the member listens."""
    return ADDRESS.format(4 * self._numbers[member] + 2)

  def inside(self, member: str) -> list[str]:
    """Returns the words before a command that run it in the namespace."""
    return ['nsenter', f'--net={self._path(member)}', '--']

  def shape(self, mbits: float | None, delay_ms: float = 0.0) -> None:
    """Limits every link, in both directions; None: no longer.

    Args:
      delay_ms: what a packet takes from one member to another, through two
        links.
    """
    assert self._delays or not delay_ms
    if self._wires is not None:
      try:
        self._wires.delay(delay_ms / 2)
      except OSError as error:
        raise LinksFailed(f'delayed wires: {error}') from None
    for where, device in self._shaped():
      # Drops what waits: a packet larger than a new bucket never leaves it.
      self._command(where, *_REPLACE, device, 'root', 'pfifo')
      if mbits is not None:
        self._command(where, *_shaping(device, 1e6 * mbits))

  def counts(self) -> dict[str, tuple[int, int]]:
    """Returns the bytes that each member's interface has sent and received."""
    found = {}
    for name in self._numbers:
      text = pathlib.Path(
        f'/proc/{self._holders[name].pid}/net/dev'
      ).read_text()
      line = next(x for x in text.splitlines() if x.strip().startswith('eth0:'))
      words = line.partition(':')[2].split()
      found[name] = int(words[8]), int(words[0])
    return found

  def probe_mbits(self, source: str, target: str, seconds: float) -> float:
    """Measures what one TCP connection carries in so many seconds."""
    with self._entered(target):
      server = socket.create_server((self.address(target), 0))
    with self._entered(source):
      sender = socket.create_connection(server.getsockname(), START_S)
    with server, sender, server.accept()[0] as receiver:
      sending = threading.Thread(target=_send, args=(sender,), daemon=True)
      sending.start()
      receiver.settimeout(START_S)
      receiver.recv(PROBE_BYTES)
      began_s, carried = time.monotonic(), 0
      while time.monotonic() < began_s + seconds:
        carried += len(receiver.recv(PROBE_BYTES))
      passed_s = time.monotonic() - began_s
      sender.shutdown(socket.SHUT_RDWR)
      sending.join()
    return 8e-6 * carried / passed_s

  def probe_delay_ms(self, source: str, target: str) -> float:
    """Measures half of a round trip, the shortest of some."""
    with self._entered(target):
      server = socket.create_server((self.address(target), 0))
    with server:
      server.setblocking(False)
      trips_s = []
      for _ in range(PROBES):
        began_s = time.monotonic()
        with self._entered(source):
          socket.create_connection(server.getsockname(), START_S).close()
        trips_s.append(time.monotonic() - began_s)
    return 1e3 * min(trips_s) / 2

  def _routers(self) -> tuple[str, ...]:
    """Returns the names of the namespaces that forward."""
    return ('',)

  def _shaped(self) -> Iterator[tuple[str, str]]:
    """Yields namespace and device of every end of a shaped link."""
    for name, k in self._numbers.items():
      yield from ((name, 'eth0'), ('', f'eth{k}'))

  def _connect_all(self) -> None:
    if self._delays:
      pids = {name: holder.pid for name, holder in self._holders.items()}
      wires = [
        (pids[name], 'eth0', pids[''], f'eth{k}')
        for name, k in self._numbers.items()
      ]
      try:
        self._wires = DelayedWires(wires)
      except OSError as error:
        raise LinksFailed(str(error)) from None
    for name, k in self._numbers.items():
      self._connect(name, 'eth0', '', k)

  def _connect(self, name: str, device: str, router: str, k: int) -> None:
    """Makes link k from a namespace to a router, its way to all others."""
    ends = ((name, device), (router, f'eth{k}'))
    pids = [str(self._holders[where].pid) for where, _ in ends]
    if self._wires is None:
      self._run(
        *('ip', 'link', 'add', device, 'netns', pids[0], 'type', 'veth'),
        *('peer', 'name', f'eth{k}', 'netns', pids[1]),
      )
    near, far = ADDRESS.format(4 * k + 2), ADDRESS.format(4 * k + 1)
    for (where, at), address in zip(ends, (near, far)):
      self._command(where, 'ip', 'addr', 'add', f'{address}/30', 'dev', at)
      self._command(where, 'ip', 'link', 'set', at, 'up')
    self._command(name, 'ip', 'link', 'set', 'lo', 'up')
    self._command(name, 'ip', 'route', 'add', 'default', 'via', far)

  def _path(self, member: str) -> str:
    return f'/proc/{self._holders[member].pid}/ns/net'

  def _command(self, member: str, *command: str) -> None:
    self._run(*self.inside(member), *command)

  def _run(self, *command: str) -> None:
    done = subprocess.run(
      command, capture_output=True, text=True, process_group=0
    )
    if done.returncode:
      raise LinksFailed(f'{" ".join(command)}: {done.stderr.strip()}')

  @contextlib.contextmanager
  def _entered(self, member: str) -> Iterator[None]:
    """Has this thread's new sockets belong to the member's namespace."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(file) -> None:
      if libc.setns(file.fileno(), CLONE_NEWNET):
        raise LinksFailed(f'setns: {os.strerror(ctypes.get_errno())}')

    with (
      open('/proc/thread-self/ns/net') as home,
      open(self._path(member)) as there,
    ):
      enter(there)
      try:
        yield
      finally:
        enter(home)


class SiteLinks(ShapedLinks):
  """Two sites with a router each; only the link between these is shaped.

  Args:
    members: the names of all.
    far: those that are not at the first one's site.
  """

  FAR = 'far'  # The second router; the one at the syncer has no name.

  def __init__(self, members: Sequence[str], far: Sequence[str]):
    super().__init__(members)
    self._far = frozenset(far)

  def _routers(self) -> tuple[str, ...]:
    return ('', self.FAR)

  def _shaped(self) -> Iterator[tuple[str, str]]:
    yield from ((self.FAR, 'trunk'), ('', f'eth{len(self._numbers)}'))

  def _connect_all(self) -> None:
    trunk = len(self._numbers)
    self._connect(self.FAR, 'trunk', '', trunk)
    for name, k in self._numbers.items():
      router = self.FAR if name in self._far else ''
      self._connect(name, 'eth0', router, k)
      if router:  # The near router finds it beyond the trunk.
        net = f'{ADDRESS.format(4 * k)}/30'
        beyond = ADDRESS.format(4 * trunk + 2)
        self._command('', 'ip', 'route', 'add', net, 'via', beyond)


def _hold() -> subprocess.Popen:
  command = ['unshare', '--net', '--', 'sleep', 'infinity']
  return subprocess.Popen(
    dying_with_parent(command),
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    process_group=0,  # Ctrl-C in a terminal reaches only the command.
  )


def _until_apart(holder: subprocess.Popen) -> None:
  """Waits until a holder is in a namespace of its own."""
  home = os.readlink('/proc/self/ns/net')
  over_s = time.monotonic() + START_S
  while holder.poll() is None and time.monotonic() < over_s:
    with contextlib.suppress(OSError):
      if os.readlink(f'/proc/{holder.pid}/ns/net') != home:
        return
    time.sleep(0.01)
  raise LinksFailed('unshare --net made no namespace')


def _shaping(device: str, bps: float) -> list[str]:
  bucket = max(BUCKET_BYTES_MIN, round(bps / 8 * BUCKET_S))
  queue = max(QUEUE_BYTES_MIN, round(bps / 8 * QUEUE_S))
  return [
    *(*_REPLACE, device, 'root', 'tbf'),
    *('rate', f'{round(bps)}bit', 'burst', str(bucket), 'limit', str(queue)),
  ]


def _send(sender: socket.socket) -> None:
  with contextlib.suppress(OSError):  # The other end has seen enough.
    while True:
      sender.sendall(bytes(PROBE_BYTES))
