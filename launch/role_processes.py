# SPDX-License-Identifier: Apache-2.0
"""The processes of one role, which live and die together.

A learner of several hosts is one computation: if one of its processes is dead,
the others wait for it in a collective until a heartbeat is missed. So the first
death ends all of them at once; nothing of theirs is worth saving. A process
that leaves in good order gives the others time to do the same.
"""

import contextlib
import dataclasses
import errno
import os
import pathlib
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from diloco.config.hardware import GROUP_SECRET
from diloco.config.sections import ConfigError
from diloco.transport import sockets
from launch.exit_policy import (
  DEAD,
  RUNNING,
  WAITING,
  describe_exit,
  has_left,
  severity,
)
from launch.parent_death import dying_with_parent
from launch.program import Role

LOOPBACK = '127.0.0.1'  # All processes are on this machine.

Tell = Callable[[str, str, int, str], None]  # Process, event, pid, detail.


def free_address(host: str, port: int) -> str:
  """Returns a free 'host:port'; port 0 finds any.

  Raises:
    ConfigError: the host is unknown, not of this machine, or the port taken.
  """
  try:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
  except socket.gaierror as error:
    raise ConfigError(
      [f'transport.host={host!r}: can not be resolved ({error.strerror})']
    ) from None
  family, *_, address = found[0]
  try:
    free = port or sockets.free_port(address[0])
    socket.create_server((address[0], free), family=family).close()
  except OSError as error:
    raise ConfigError([_refused(host, port, error)]) from None
  return sockets.join(host, free)


def check_metrics_ports(roles: Sequence[Role]) -> None:
  """Refuses ports of /metrics at which something listens.

  Raises:
    ConfigError: names the first.
  """
  for role in roles:
    for port in range(role.metrics_port, role.metrics_port + role.hosts):
      with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
          probe.bind((LOOPBACK, port))
        except OSError as error:
          raise ConfigError(
            [f'--metrics_port: port {port} of {role.name}: {error.strerror}']
          ) from None


def _refused(host: str, port: int, error: OSError) -> str:
  if error.errno == errno.EADDRINUSE:
    return f'transport.port={port}: is in use on {host}; 0 finds a free one'
  if error.errno == errno.EADDRNOTAVAIL:
    return f'transport.host={host!r}: is no address of this machine'
  return f'transport.host={host!r}, transport.port={port}: {error.strerror}'


@dataclasses.dataclass(frozen=True)
class ProcessExit:
  """A process that was reaped."""

  process: str
  pid: int
  code: int  # −n: by signal n.


@dataclasses.dataclass(frozen=True)
class GroupExit:
  """The end of a role's processes: none of them is left."""

  judged: ProcessExit  # The one by which all of them are judged.
  last: ProcessExit  # The last exit, which has not been announced yet.


class RoleProcesses:
  """A role, its running processes if any, and when they are started again.

  Attributes:
    start_at_s: on the monotonic clock; for WAITING.

  Args:
    tell: is told what happens to each process.
    leave_s: how long the others may go on after one has left in good order.
  """

  def __init__(self, role: Role, tell: Tell, leave_s: float):
    self.role = role
    self.state = WAITING
    self.start_at_s = 0.0
    self.starts = 0
    self._tell = tell
    self._leave_s = leave_s
    self._running: dict[str, subprocess.Popen] = {}
    self._exits: list[ProcessExit] = []  # Of this start.
    self._told_to_leave = False
    self._leave_at_s = float('inf')  # On the monotonic clock.
    self._coordinator = ''

  @property
  def pid(self) -> int | None:
    """The pid of its first running process; None: none runs."""
    return next((popen.pid for popen in self._running.values()), None)

  def start(
    self, log: Callable[[str], pathlib.Path], environment: Mapping[str, str]
  ) -> None:
    """Starts all processes; they find each other at an address of their own.

    Args:
      log: path of a process's log, by its name.
      environment: of every process, but for what the role adds.
    """
    role = self.role
    if role.hosts > 1:
      self._coordinator = _another_address(self._coordinator)
      environment = {**environment, GROUP_SECRET: secrets.token_hex(16)}
    self._exits.clear()
    self._told_to_leave = False
    self._leave_at_s = float('inf')
    self.state = RUNNING
    self.starts += 1
    for host in range(role.hosts):
      name = role.process(host)
      path = log(name)
      path.parent.mkdir(parents=True, exist_ok=True)
      with path.open('ab') as file:
        self._running[name] = subprocess.Popen(
          dying_with_parent(role.command(host, self._coordinator)),
          stdin=subprocess.DEVNULL,
          stdout=file,
          stderr=subprocess.STDOUT,
          env={**environment, **role.variables(host)},
          process_group=0,
        )
      detail = f'start {self.starts}'
      self._tell(name, 'started', self._running[name].pid, detail)

  def send(self, number: signal.Signals, event: str, reason: str) -> None:
    """Signals all processes that run, each announced beforehand."""
    self._told_to_leave |= number == signal.SIGTERM
    for name, popen in self._running.items():
      self._tell(name, event, popen.pid, reason)
      _signal_group(popen, number)

  def reap(self) -> GroupExit | None:
    """Notices exits, and ends all processes once one has ended.

    Returns:
      The exit to be judged, once none is left; it is returned once.
    """
    ended = [n for n, each in self._running.items() if _has_exited(each)]
    for name in ended:
      self._reap_process(name)
    if self._running and ended:
      self._end_the_others()
    if self._running and time.monotonic() >= self._leave_at_s:
      self.kill('the others have left')
    if self._running or self.state != RUNNING:
      return None
    self.state = DEAD
    judged = max(self._exits, key=lambda each: severity(each.code))
    return GroupExit(judged, self._exits[-1])

  def kill(self, reason: str) -> None:
    """Ends all processes at once, and reaps them."""
    self.send(signal.SIGKILL, 'stopped', f'SIGKILL: {reason}')
    for name in list(self._running):
      self._reap_process(name)

  def _end_the_others(self) -> None:
    """Kills the others after a death; after a departure, lets them leave."""
    worst = max(self._exits, key=lambda each: severity(each.code))
    if not has_left(worst.code):
      self.kill(f'{worst.process} is dead')
      return
    leave_at_s = time.monotonic() + self._leave_s
    self._leave_at_s = min(self._leave_at_s, leave_at_s)
    if worst.code and not self._told_to_leave:
      reason = f'SIGTERM: {worst.process} has left'
      self.send(signal.SIGTERM, 'stopped', reason)

  def _reap_process(self, name: str) -> None:
    """Ends what is left of a process's group, then reaps the process."""
    # In this order: as long as the leader is not reaped, its group's id can't
    # belong to another process.
    popen = self._running[name]
    if popen.returncode is None:
      _signal_group(popen, signal.SIGKILL)
    ended = ProcessExit(name, popen.pid, popen.wait())
    del self._running[name]
    self._exits.append(ended)
    if self._running:
      self._tell(name, 'exited', ended.pid, describe_exit(ended.code))


def _another_address(last: str) -> str:
  """Returns a free address other than that of the last start."""
  while (address := free_address(LOOPBACK, 0)) == last:
    pass
  return address


def _has_exited(popen: subprocess.Popen) -> bool:
  """Returns True if a child has exited, without reaping it where possible."""
  if not hasattr(os, 'waitid'):  # macOS before Python 3.13.
    return popen.poll() is not None
  flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
  return os.waitid(os.P_PID, popen.pid, flags) is not None


def _signal_group(popen: subprocess.Popen, number: signal.Signals) -> None:
  """Signals the group of a child that was not reaped yet."""
  # Without rights or members: only a zombie is left of the group.
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(popen.pid, number)
