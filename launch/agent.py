# SPDX-License-Identifier: Apache-2.0
"""The agent of a host of a learner of several slices: starts its processes.

  python -m launch.agent --rendezvous=host:port --slice=1 --slice_host=0 \\
    --slice_hosts=2 …the flags of `python -m diloco.learner`…

It connects to the learner's rendezvous and waits for a world of which its slice
is one. Then it starts this host's process of that, and says how it ended, which
is whether the host's boundary is in memory. The folder in memory belongs to the
agent: it outlives the process, and goes with the agent.

It ends with the learner's exit code when the run is over, when it can not run
as configured, and when worlds end again and again. A process that hangs is
killed. After SIGTERM its slice leaves the world at a boundary, with 143; the
learner leaves in order if all of its slices are told.
"""

import contextlib
import hashlib
import os
import pathlib
import queue
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

from absl import flags, logging

from diloco.config import flags as config_flags
from diloco.config.hardware import GROUP_SECRET, WORLD_OF_SLICES
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.metrics.workdir import Workdir, learner_name
from diloco.protocol import slice_messages
from diloco.protocol.host_messages import WANTED, alive_file
from diloco.protocol.slice_messages import (
  AgentHere,
  AgentLeaves,
  AgentReady,
  AskForWorld,
  EndProcess,
  LearnerOver,
  StartWorld,
)
from diloco.run.bind_policy import check_group, given_access
from diloco.run.command import run_command
from diloco.transport import host_channel, sockets
from diloco.transport.host_channel import GroupLost, HostConnection
from launch import standby
from launch.heartbeat import SILENT_S, Heartbeat
from launch.program import KINDS, LEARNER, Role
from launch.rendezvous import Place, channel_secret
from launch.supervisor import (
  EXIT_STOPPED,
  POLL_S,
  SHARED_MEMORY,
  describe_exit,
  has_exited,
  signal_group,
  started,
)

AGAIN_S = 1.0  # Between two attempts to reach the rendezvous.
RENDEZVOUS = 'the rendezvous'  # As messages name it.
ABSENT_S = 300.0  # Without it and a process; it may be elsewhere by then.

_RENDEZVOUS = flags.DEFINE_string(
  'rendezvous', None, "host:port of the learner's rendezvous."
)
_SLICE = flags.DEFINE_integer('slice', None, 'Number of this slice, from 0.')
_HOST = flags.DEFINE_integer('slice_host', 0, 'This host of it, from 0.')
_HOSTS = flags.DEFINE_integer('slice_hosts', 1, 'Hosts of each slice.')
_MEGASCALE = flags.DEFINE_bool(
  'megascale', False, 'Slices are of TPUs, which libtpu joins.'
)
OWN_FLAGS = tuple(
  flag.name for flag in (_RENDEZVOUS, _SLICE, _HOST, _HOSTS, _MEGASCALE)
)


class Agent:
  """Starts one process of one host after the other, as the rendezvous says.

  Args:
    role: the learner: all of its hosts.
    place: which of them this is.
    address: of this host, for the others.
    memory: folder for its boundaries.
    workdir: tells whether the run is over, where that is seen from here.
    megascale: whether libtpu joins the slices.
  """

  def __init__(
    self,
    role: Role,
    place: Place,
    address: str,
    memory: pathlib.Path,
    workdir: Workdir,
    megascale: bool = False,
  ):
    self._role = role
    self._place = place
    self._address = address
    self._memory = memory
    self._workdir = workdir
    self._megascale = megascale
    self._heard: queue.SimpleQueue = queue.SimpleQueue()
    self._rendezvous: HostConnection | None = None
    self._process: subprocess.Popen | None = None
    self._standby: subprocess.Popen | None = None  # For the next one.
    self._stand_by_at_s = float('inf')  # On the monotonic clock.
    self._heartbeat: Heartbeat | None = None
    self._world, self._code = 0, 0  # Of the last process.
    self._over: int | None = None
    self._told = False  # To stop, and
    self._has_said_so = False
    self._absent_since_s = time.monotonic()
    self._why_absent = ''

  def stop(self) -> None:
    """Has its slice leave; for a handler of signals."""
    self._told = True

  def run(self, at: tuple[str, int], secret: bytes) -> int:
    """Returns the exit code; runs on the main thread.

    Args:
      at: host and port of the rendezvous.
      secret: proven by both sides.
    """
    arguments = (at, secret, self._heard)
    threading.Thread(target=_keep, args=arguments, daemon=True).start()
    try:
      while (code := self._turn()) is None:
        pass
      return code
    finally:
      self._signal(signal.SIGKILL)
      if self._standby is not None:
        self._standby.kill()
        self._standby.wait()
      shutil.rmtree(self._memory, ignore_errors=True)
      if self._rendezvous is not None:
        self._rendezvous.close(AGAIN_S)

  def _turn(self) -> int | None:
    """Returns the exit code once there is one."""
    with contextlib.suppress(queue.Empty):
      self._hear(self._heard.get(timeout=POLL_S))
    if self._process is not None and has_exited(self._process):
      self._reap()
    if self._heartbeat and self._heartbeat.is_silent(time.monotonic()):
      logging.warning('SIGKILL: the process is silent for %g s', SILENT_S)
      self._heartbeat = None
      self._signal(signal.SIGKILL)
    if self._process and time.monotonic() >= self._stand_by_at_s:
      self._stand_by_at_s = float('inf')
      self._standby = started(
        standby.COMMAND, os.environ, stdin=subprocess.PIPE
      )
    if self._told and not self._has_said_so and self._process is not None:
      self._has_said_so = True
      if self._rendezvous is None:
        self._signal(signal.SIGTERM)
      else:
        self._rendezvous.send(AgentLeaves())
    if self._over is not None and not self._told:
      return self._over
    if self._process is not None:
      return None
    if self._told:  # Its last process may have come to the end of the run.
      return 0 if self._world and self._code == 0 else EXIT_STOPPED
    return None if self._rendezvous is not None else self._alone()

  def _alone(self) -> int | None:
    """Returns the exit code where the rendezvous does not come back."""
    if time.monotonic() < self._absent_since_s + ABSENT_S:
      return None
    logging.error('there was no rendezvous for %.0f s', ABSENT_S)
    return 0 if self._workdir.summary.exists() else 1

  def _hear(self, message) -> None:
    match message:
      case HostConnection():
        self._rendezvous = message
        self._why_absent, self._has_said_so = '', False
        role, world = self._role, self._world if self._process else 0
        hosts = role.hosts // role.slices
        message.send(AgentHere(*self._place, role.slices, hosts, world))
        self._get_ready()
      case GroupLost():
        if self._why_absent != str(message):  # Else once a second.
          self._why_absent = str(message)
          logging.warning('%s', message)
        if self._rendezvous is not None:
          self._rendezvous.close(POLL_S)
          self._absent_since_s = time.monotonic()
        self._rendezvous = None
      case StartWorld():
        self._start(message)
      case AskForWorld():
        (self._memory / WANTED).touch()
      case EndProcess():
        self._signal(signal.SIGKILL if message.kill else signal.SIGTERM)
      case LearnerOver():
        self._over = message.code
      case _:
        raise TypeError(f'Not of a rendezvous: {message!r}.')

  def _get_ready(self) -> None:
    """Asks for the next world, once no process runs."""
    if self._process is not None or self._rendezvous is None:
      return
    port = sockets.free_port(self._address)
    coordinator = sockets.join(self._address, port)
    self._rendezvous.send(AgentReady(coordinator, self._world, self._code))

  def _start(self, world: StartWorld) -> None:
    (self._memory / WANTED).unlink(missing_ok=True)
    role, (slice_, host) = self._role, self._place
    environment = {GROUP_SECRET: world.secret}
    if self._megascale and len(world.slices) > 1:
      first, _ = sockets.split(world.coordinator)
      environment |= {
        f'{WORLD_OF_SLICES}COORDINATOR_ADDRESS': first,
        f'{WORLD_OF_SLICES}NUM_SLICES': str(len(world.slices)),
        f'{WORLD_OF_SLICES}SLICE_ID': str(world.slices.index(slice_)),
      }
    command = role.command(
      role.hosts_of([slice_])[host],
      world.coordinator,
      world.slices,
      str(self._memory),
      world.service,
    )
    logging.info('world %d: slices %s', world.world, world.slices)
    self._world = world.world
    self._heartbeat = Heartbeat(self._memory / alive_file(slice_, host))
    waits, self._standby = self._standby, None
    if standby.becomes(waits, command, environment):
      self._process = waits
    else:
      self._process = started(command, {**os.environ, **environment})
    if role.argv[1] == '-m':
      self._stand_by_at_s = time.monotonic() + standby.AFTER_S

  def _reap(self) -> None:
    """Notes how the process has ended, and says so."""
    self._signal(signal.SIGKILL)  # What is left of its group.
    self._code, self._process = self._process.wait(), None
    self._heartbeat = None
    logging.info('world %d: %s', self._world, describe_exit(self._code))
    self._get_ready()

  def _signal(self, number: signal.Signals) -> None:
    if self._process is not None:
      signal_group(self._process, number)


def _keep(at: tuple[str, int], secret: bytes, heard: queue.SimpleQueue) -> None:
  """Connects to the rendezvous, again and again.

  Args:
    heard: gets each connection, what it says, and why there is none.
  """
  while True:
    try:
      raw = host_channel.connect(at, secret, peer=RENDEZVOUS)
    except GroupLost as error:
      heard.put(error)
      time.sleep(AGAIN_S)
      continue
    lost: queue.SimpleQueue = queue.SimpleQueue()
    heard.put(
      HostConnection(
        raw, slice_messages.FROM_RENDEZVOUS, heard.put, lost.put, RENDEZVOUS
      )
    )
    heard.put(lost.get())


def learner_flags(words: Sequence[str]) -> list[str]:
  """Returns the flags of a command line that are the learner's."""
  own = tuple(f'--{name}' for name in OWN_FLAGS)
  return [word for word in words if word.partition('=')[0] not in own]


def memory_folder(name: str) -> pathlib.Path:
  """Returns a folder in memory that a next agent of this name finds, too.

  Raises:
    ConfigError: it is another user's.
  """
  shared = SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else None
  digest = hashlib.sha256(f'{os.getuid()} {name}'.encode()).hexdigest()[:16]
  path = pathlib.Path(shared or tempfile.gettempdir()) / f'diloco-{digest}'
  with contextlib.suppress(FileExistsError):
    path.mkdir(mode=0o700)
  found = path.lstat()
  if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
    raise ConfigError([f'{path}: is not a folder of this user'])
  path.chmod(0o700)
  return path


def main(config: RunConfig) -> int:
  """Runs the agent; returns its exit code."""
  learner, slices, hosts = flags.FLAGS.learner, config.mesh.slices, _HOSTS.value
  place = Place(_SLICE.value, _HOST.value)
  if place.slice not in range(slices):
    raise ConfigError(
      [f'--slice={place.slice}: must be in 0 … {slices - 1} (mesh.slices)']
    )
  if place.host not in range(hosts):
    raise ConfigError(
      [f'--slice_host={place.host}: must be in 0 … {hosts - 1} (--slice_hosts)']
    )
  with config_flags.refusing():
    at = sockets.split(_RENDEZVOUS.value)
    access = given_access(config.transport, bind=None)
    check_group(
      _RENDEZVOUS.value,
      config.transport,
      bool(access.token),
      **config_flags.access_vouched(),
      named='rendezvous',
    )
    address = sockets.routable(config.transport.host)
  workdir = pathlib.Path(flags.FLAGS.workdir).absolute()
  command = (sys.executable, '-m', KINDS[LEARNER].module)
  agent = Agent(
    Role(
      learner_name(learner),
      (*command, *learner_flags(sys.argv[1:])),
      hosts=slices * hosts,
      slices=slices,
    ),
    place,
    address,
    memory_folder(f'{workdir} {learner_name(learner)} {place}'),
    Workdir(workdir),
    _MEGASCALE.value,
  )
  signal.signal(signal.SIGTERM, lambda *_: agent.stop())
  return agent.run(at, channel_secret(access, learner))


if __name__ == '__main__':
  flags.DEFINE_string('workdir', None, 'Folder of the run.')
  flags.DEFINE_integer('learner', None, "The learner's id, from 0.")
  flags.DEFINE_string('syncer', None, 'host:port of the syncer.')
  flags.DEFINE_float('notice_s', 25.0, 'Seconds from SIGTERM to its end.')
  run_command(
    main,
    required=('workdir', 'learner', 'syncer', 'rendezvous', 'slice'),
    role='agent',
    access=True,
  )
