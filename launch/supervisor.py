# SPDX-License-Identifier: Apache-2.0
"""Keeps the processes of a run alive, and leaves none behind."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from launch.orphans import dying_with_parent
from launch.program import Role

EXIT_CONFIG = 78  # The same configuration would fail again.

# States of a process.
RUNNING = 'running'
WAITING = 'waiting'  # Dead; will be started again.
FINISHED = 'finished'  # Exited with 0.
DEAD = 'dead'  # Will not be started again.

TERM_S = 10.0  # From SIGTERM to SIGKILL.
LINGER_S = 30.0  # From the run's end until those who stay are stopped.
POLL_S = 0.05


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
  """What is known of one process of the run."""

  name: str
  state: str
  pid: int | None  # None unless running.
  starts: int


@dataclasses.dataclass(frozen=True)
class Decision:
  """What becomes of a process that exited, and why."""

  state: str  # FINISHED, WAITING or DEAD.
  stops_run: bool
  reason: str


def after_exit(
  code: int,
  restarts: int,
  restarts_max: int,
  run_is_over: bool,
  optional: bool = False,
) -> Decision:
  """Decides about a process that exited with `code` (−n: by signal n)."""
  how = describe_exit(code)
  if code == 0:
    return Decision(FINISHED, False, how)
  if run_is_over:
    return Decision(DEAD, False, f'{how}; the run is over, no restart')
  if code == EXIT_CONFIG:
    reason = f'{how}: it can not run as configured'
    return Decision(DEAD, not optional, reason)
  if restarts >= restarts_max:
    reason = f'{how}; restarts used up ({restarts} of {restarts_max})'
    return Decision(DEAD, not optional, reason)
  return Decision(WAITING, False, f'{how}; restart {restarts + 1}')


def describe_exit(code: int) -> str:
  """'exited with code 1', 'died of SIGKILL'."""
  if code >= 0:
    return f'exited with code {code}'
  return f'died of {signal.Signals(-code).name}'


class _Process:
  """A role, its current process if any, and when it is started again."""

  def __init__(self, role: Role):
    self.role = role
    self.popen: subprocess.Popen | None = None
    self.state = WAITING
    self.start_at_s = 0.0  # On the monotonic clock; for WAITING.
    self.starts = 0


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
  ):
    """Starts nothing yet.

    Args:
      roles: the processes; their names are unique.
      log: path of a process's log, by its name.
      environment: the whole environment of every process.
      restarts_max: of one process; one more death stops the run.
      restart_delay_s: between a death and the restart.
      announce: is told every event.
      linger_s: how long others may go on when the run has ended.
    """
    self._processes = {role.name: _Process(role) for role in roles}
    assert len(self._processes) == len(roles), f'a name twice: {roles}'
    self._log = log
    self._environment = dict(environment)
    self._restarts_max = restarts_max
    self._restart_delay_s = restart_delay_s
    self._announce = announce
    self._linger_s = linger_s
    self._stop_at_s: float | None = None
    self.failure: str | None = None  # Why the run can't go on.

  def __enter__(self) -> 'Supervisor':
    return self

  def __exit__(self, *exception) -> None:
    self.stop()

  @property
  def is_over(self) -> bool:
    """Nothing runs and nothing will be started, or the run has failed."""
    if self.failure:
      return True
    ends = (FINISHED, DEAD)
    return all(p.state in ends for p in self._processes.values())

  def states(self) -> list[ProcessState]:
    """Of all processes, in the order of the roles."""
    return [
      ProcessState(name, p.state, p.popen.pid if p.popen else None, p.starts)
      for name, p in self._processes.items()
    ]

  def poll(self) -> None:
    """Notices exits, starts what is due, stops those who stay too long."""
    for process in self._processes.values():
      if process.popen and _has_exited(process.popen):
        self._reap(process)
    self._end_lingering()
    for process in self._processes.values():
      is_due = time.monotonic() >= process.start_at_s
      if process.state == WAITING and is_due and not self.failure:
        self._start(process)

  def is_running(self, name: str) -> bool:
    return self._processes[name].state == RUNNING

  def kill(self, name: str, reason: str) -> None:
    """SIGKILL for a running process, announced beforehand."""
    self._send(name, signal.SIGKILL, 'killed', reason)

  def pause(self, name: str, reason: str) -> None:
    """SIGSTOP for a running process, announced beforehand."""
    self._send(name, signal.SIGSTOP, 'paused', reason)

  def go_on(self, name: str, reason: str) -> None:
    """SIGCONT for a paused process, announced beforehand."""
    self._send(name, signal.SIGCONT, 'went on', reason)

  def stop(self, deadline_s: float = TERM_S) -> None:
    """SIGTERM, then SIGKILL after the deadline; returns when all are gone."""
    for process in self._processes.values():
      if process.state == WAITING:
        process.state = DEAD
      if process.popen:
        self._tell(process.role.name, 'stopped', process.popen.pid, 'SIGTERM')
        _signal_group(process.popen, signal.SIGTERM)
    give_up_at_s = time.monotonic() + deadline_s
    while running := [p for p in self._processes.values() if p.popen]:
      for process in running:
        if _has_exited(process.popen):
          pid, name = process.popen.pid, process.role.name
          code = self._bury(process, DEAD)
          self._tell(name, 'exited', pid, describe_exit(code))
        elif time.monotonic() >= give_up_at_s:
          _signal_group(process.popen, signal.SIGKILL)
      time.sleep(POLL_S)

  def _send(
    self, name: str, number: signal.Signals, event: str, reason: str
  ) -> None:
    popen = self._processes[name].popen
    assert popen is not None, f'{name} is not running'
    self._tell(name, event, popen.pid, reason)
    _signal_group(popen, number)

  def _start(self, process: _Process) -> None:
    path = self._log(process.role.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('ab') as log:
      process.popen = subprocess.Popen(
        dying_with_parent(process.role.argv),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=self._environment,
        process_group=0,
      )
    process.state = RUNNING
    process.starts += 1
    detail = f'start {process.starts}'
    self._tell(process.role.name, 'started', process.popen.pid, detail)

  def _reap(self, process: _Process) -> None:
    pid = process.popen.pid
    code = self._bury(process, DEAD)
    decision = after_exit(
      code,
      process.starts - 1,
      self._restarts_max,
      self._stop_at_s is not None,
      process.role.optional,
    )
    process.state = decision.state
    process.start_at_s = time.monotonic() + self._restart_delay_s
    name = process.role.name
    if decision.stops_run and not self.failure:
      self.failure = f'{name} {decision.reason}'
    self._tell(name, 'exited', pid, decision.reason)

  def _bury(self, process: _Process, state: str) -> int:
    """Ends what is left of the group, then reaps its leader."""
    # In this order: as long as the leader is not reaped, its group's id can't
    # belong to anybody else.
    if process.popen.returncode is None:
      _signal_group(process.popen, signal.SIGKILL)
    code = process.popen.wait()
    process.popen, process.state = None, state
    return code

  def _end_lingering(self) -> None:
    enders = [p for p in self._processes.values() if p.role.ends_run]
    others = [p for p in self._processes.values() if not p.role.ends_run]
    needed = [p for p in others if not p.role.optional]
    for few, many in ((enders, others), (needed, enders)):
      if few and many and all(p.state == FINISHED for p in few):
        break
    else:
      return
    now_s = time.monotonic()
    if self._stop_at_s is None:
      self._stop_at_s = now_s + self._linger_s
    for process in many:
      if process.state == WAITING and few is enders:
        process.state = DEAD
    if now_s < self._stop_at_s or self.is_over:
      return
    stayed = ', '.join(p.role.name for p in many if p.popen)
    if few is needed:
      self.failure = f'{stayed} goes on though all others have finished'
    self.stop()

  def _tell(self, process: str, event: str, pid: int, detail: str) -> None:
    self._announce(ProcessEvent(time.time(), process, event, pid, detail))


def _has_exited(popen: subprocess.Popen) -> bool:
  """Whether a child has exited; does not reap it where that can be known."""
  if not hasattr(os, 'waitid'):  # macOS before Python 3.13.
    return popen.poll() is not None
  flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
  return os.waitid(os.P_PID, popen.pid, flags) is not None


def _signal_group(popen: subprocess.Popen, number: signal.Signals) -> None:
  """Signals the group of a child that was not reaped yet."""
  # Without rights or members: only a zombie is left of the group.
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(popen.pid, number)
