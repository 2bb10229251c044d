# SPDX-License-Identifier: Apache-2.0
"""Keeps the roles of a run alive, and leaves no process behind."""

import dataclasses
import os
import pathlib
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from absl import logging

from launch.exit_policy import (
  DEAD,
  FINISHED,
  RUNNING,
  STOPPED,
  WAITING,
  after_exit,
  describe_exit,
  has_left,
)
from launch.program import Role
from launch.role_processes import GroupExit, RoleProcesses

LINGER_S = 30.0  # From the run's end until remaining processes are stopped.
POLL_S = 0.05
DISMISSED = 'it was dismissed'  # The end of an event's detail.
LOG_LOOK_S = 10.0
LOG_BYTES = 64 << 20  # Of one process; then its log is cut, and
LOGS_KEPT = 4  # so many older ones stay: NAME.log.1 is the newest of them.


@dataclasses.dataclass(frozen=True)
class ProcessEvent:
  """Something happened to a process; one line of `events.jsonl`."""

  time_s: float  # Seconds since the epoch.
  process: str
  event: str  # 'started', 'killed', 'paused', 'went on', 'stopped', 'exited'.
  pid: int
  detail: str


@dataclasses.dataclass(frozen=True)
class ProcessState:
  """The state of one role of the run."""

  name: str
  state: str  # One of `exit_policy`.
  pid: int | None  # Of its first process; None unless running.
  starts: int


class Supervisor:
  """Starts roles, restarts what dies, stops all on leaving its `with` block.

  Each process leads a group of its own, so Ctrl-C in a terminal reaches only
  the launcher; the kernel kills them when the launcher dies. Call `poll` a
  few times a second, from the main thread.
  """

  def __init__(
    self,
    roles: Sequence[Role],
    log: Callable[[str], pathlib.Path],
    environment: Mapping[str, str],
    restarts_max: int,
    restart_delay_s: float,
    announce: Callable[[ProcessEvent], None],
    linger_s: float = LINGER_S,
    hurry: Callable[[], bool] = lambda: False,
  ):
    """Stores the arguments; starts nothing.

    Args:
      roles: the parts of the run; their names are unique.
      log: returns the path of a process's log, by its name.
      restarts_max: restarts per role; one more death stops the run.
      linger_s: how long others may go on when the run has ended, or when one
        process of their role has.
      hurry: returns True to stop waiting for processes that were told to leave.
    """
    self._groups = {
      role.name: RoleProcesses(role, self._tell, linger_s) for role in roles
    }
    assert len(self._groups) == len(roles), f'a name twice: {roles}'
    self._log = log
    self._environment = dict(environment)
    self._restarts_max = restarts_max
    self._restart_delay_s = restart_delay_s
    self._announce = announce
    self._linger_s = linger_s
    self._hurry = hurry
    self._stop_at_s: float | None = None
    self._looked_s = time.monotonic()
    self._dismissed: set[str] = set()  # They leave for good.
    self.failure: str | None = None  # Why the run can't go on.

  def __enter__(self) -> 'Supervisor':
    return self

  def __exit__(self, *exception) -> None:
    self.stop()

  @property
  def is_over(self) -> bool:
    """Returns True if nothing runs or will be started, or the run has
    failed.
    """
    if self.failure:
      return True
    ends = (FINISHED, DEAD, STOPPED)
    return all(group.state in ends for group in self._groups.values())

  def states(self) -> list[ProcessState]:
    """Returns the states of all roles, in order."""
    return [
      ProcessState(name, group.state, group.pid, group.starts)
      for name, group in self._groups.items()
    ]

  def poll(self) -> None:
    """Notices exits, starts what is due, stops processes that stay too long."""
    for group in self._groups.values():
      if ended := group.reap():
        self._judge(group, ended)
    self._end_lingering()
    if time.monotonic() - self._looked_s >= LOG_LOOK_S:
      self._looked_s = time.monotonic()
      self._rotate_logs()
    for group in self._groups.values():
      is_due = time.monotonic() >= group.start_at_s
      if group.state == WAITING and is_due and not self.failure:
        group.start(self._log, self._environment)

  def is_running(self, name: str) -> bool:
    return self._groups[name].state == RUNNING

  def kill(self, name: str, reason: str) -> None:
    """SIGKILL for a running role, announced beforehand."""
    self._send(name, signal.SIGKILL, 'killed', reason)

  def pause(self, name: str, reason: str) -> None:
    """SIGSTOP for a running role, announced beforehand."""
    self._send(name, signal.SIGSTOP, 'paused', reason)

  def go_on(self, name: str, reason: str) -> None:
    """SIGCONT for a paused role, announced beforehand."""
    self._send(name, signal.SIGCONT, 'went on', reason)

  def terminate(self, name: str, reason: str) -> None:
    """SIGTERM for a running role, announced beforehand; it is restarted."""
    self._send(name, signal.SIGTERM, 'stopped', reason)

  def add(self, role: Role) -> None:
    """Adds a role, or one that is dead; it is started at the next `poll`."""
    old = self._groups.get(role.name)
    assert old is None or old.state == DEAD, f'a name twice: {role.name}'
    self._dismissed.discard(role.name)
    self._groups[role.name] = RoleProcesses(role, self._tell, self._linger_s)

  def dismiss(self, name: str, reason: str) -> None:
    """SIGTERM for a running role, which is not started again.

    One that waits for its restart is dead at once.
    """
    if self._groups[name].state == WAITING:
      self._groups[name].state = DEAD
      return
    self._dismissed.add(name)
    self.terminate(name, reason)

  def stop(self, deadline_s: float | None = None) -> None:
    """SIGTERM, later SIGKILL; returns when all are gone.

    Args:
      deadline_s: between the two; None: what each role was promised.
    """
    for group in self._groups.values():
      if group.state == WAITING:
        group.state = STOPPED
      group.send(signal.SIGTERM, 'stopped', 'SIGTERM')
    began_s = time.monotonic()
    while running := [g for g in self._groups.values() if g.state == RUNNING]:
      for group in running:
        ended = group.reap()
        leave_s = group.role.leave_s if deadline_s is None else deadline_s
        passed_s = time.monotonic() - began_s
        # Not before it was looked whether it has left: this process itself may
        # have been stopped for that long.
        if not ended and (passed_s >= leave_s or self._hurry()):
          group.kill(f'{passed_s:.0f} s after SIGTERM')
          ended = group.reap()
        if ended:
          group.state = STOPPED
          last = ended.last
          how = describe_exit(last.code)
          self._tell(last.process, 'exited', last.pid, how)
      time.sleep(POLL_S)

  def _send(
    self, name: str, number: signal.Signals, event: str, reason: str
  ) -> None:
    group = self._groups[name]
    assert group.state == RUNNING, f'{name} is not running'
    group.send(number, event, reason)

  def _judge(self, group: RoleProcesses, ended: GroupExit) -> None:
    """Decides what becomes of processes that have ended."""
    judged, last = ended.judged, ended.last
    if group.role.name in self._dismissed and has_left(judged.code):
      group.state = DEAD
      how = describe_exit(last.code)
      self._tell(last.process, 'exited', last.pid, f'{how}; {DISMISSED}')
      return
    decision = after_exit(
      judged.code,
      group.starts - 1,
      self._restarts_max,
      self._stop_at_s is not None,
      group.role.optional,
    )
    group.state = decision.state
    group.start_at_s = time.monotonic() + self._restart_delay_s
    told = f'{judged.process} {decision.reason}'
    if decision.stops_run and not self.failure:
      self.failure = told
    is_of_last = judged is last or judged.code == last.code == 0
    detail = decision.reason if is_of_last else told
    self._tell(last.process, 'exited', last.pid, detail)

  def _end_lingering(self) -> None:
    enders = [g for g in self._groups.values() if g.role.ends_run]
    others = [g for g in self._groups.values() if not g.role.ends_run]
    needed = [g for g in others if not g.role.optional]
    for few, many in ((enders, others), (needed, enders)):
      if few and many and all(group.state == FINISHED for group in few):
        break
    else:
      return
    now_s = time.monotonic()
    if self._stop_at_s is None:
      self._stop_at_s = now_s + self._linger_s
    for group in many:
      if group.state == WAITING and few is enders:
        group.state = DEAD
    if now_s < self._stop_at_s or self.is_over:
      return
    stayed = ', '.join(g.role.name for g in many if g.state == RUNNING)
    if few is needed:
      self.failure = f'{stayed} goes on though all others have finished'
    self.stop()

  def _rotate_logs(self) -> None:
    for group in self._groups.values():
      for host in range(group.role.hosts):
        rotate_log(self._log(group.role.process(host)), LOG_BYTES)

  def _tell(self, process: str, event: str, pid: int, detail: str) -> None:
    self._announce(ProcessEvent(time.time(), process, event, pid, detail))


def rotate_log(path: pathlib.Path, bytes_max: int) -> None:
  """Cuts a log that has grown beyond `bytes_max`; a copy stays beside it.

  It stays the same file, which its process appends to: what that writes
  between copy and cut is lost.
  """
  try:
    if not path.exists() or path.stat().st_size <= bytes_max:
      return
    for n in range(LOGS_KEPT - 1, 0, -1):
      older = path.with_name(f'{path.name}.{n}')
      if older.exists():
        os.replace(older, path.with_name(f'{path.name}.{n + 1}'))
    shutil.copyfile(path, path.with_name(f'{path.name}.1'))
  except OSError as error:
    logging.warning('%s: no copy is kept: %s', path, error)
  os.truncate(path, 0)
