# SPDX-License-Identifier: Apache-2.0
"""Keeps the roles of a run alive, and leaves no process behind.

Its exit codes are those of all back ends.
"""

import contextlib
import dataclasses
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from absl import logging

from diloco.config.hardware import GROUP_SECRET
from diloco.protocol.host_messages import WANTED, alive_file
from diloco.transport import sockets
from launch import standby
from launch.coordination import Coordination
from launch.heartbeat import SILENT_S, Heartbeat
from launch.parent_death import dying_with_parent
from launch.program import Role
from launch.slices import LiveSlices

Tell = Callable[[str, str, int, str], None]  # Process, event, pid, detail.
LINGER_S = 30.0  # From the run's end until remaining processes are stopped.
POLL_S = 0.05
WORLD_ENDS_S = 15.0  # Within which other slices write their boundary.
SHARED_MEMORY = '/dev/shm'
DISMISSED = 'it was dismissed'  # The end of an event's detail.
LOG_LOOK_S = 10.0
LOG_BYTES = 64 << 20  # Of one process; then its log is cut, and
LOGS_KEPT = 4  # so many older ones stay: NAME.log.1 is the newest of them.

EXIT_CONFIG = 78  # The same configuration would fail again.
EXIT_USAGE = 64  # So would the same command line.
EXIT_CUT_OFF = 69  # A learner has made all steps, and found no syncer.
# All others but 0 are tried again.
EXITS_FATAL = (EXIT_USAGE, EXIT_CUT_OFF, EXIT_CONFIG)
EXIT_SLICES = 75  # Another slice is lost, or wanted; its state is in memory.
EXIT_STOPPED = 143  # 128 + SIGTERM: it left within its notice.

# States of a process.
RUNNING = 'running'
WAITING = 'waiting'  # Dead; will be started again.
FINISHED = 'finished'  # Exited with 0.
DEAD = 'dead'  # Will not be started again.
STOPPED = 'stopped'  # Told to leave; the same command starts it again.


@dataclasses.dataclass(frozen=True)
class ExitDecision:
  """The decision about a process that exited, and its reason."""

  state: str  # FINISHED, WAITING or DEAD.
  stops_run: bool
  reason: str


def after_exit(
  code: int,
  restarts: int,
  restarts_max: int,
  run_is_over: bool,
  optional: bool = False,
) -> ExitDecision:
  """Decides about a process that exited with `code` (−n: by signal n)."""
  how = describe_exit(code)
  if code == 0:
    return ExitDecision(FINISHED, False, how)
  if run_is_over:
    return ExitDecision(DEAD, False, f'{how}; the run is over, no restart')
  if code == EXIT_CONFIG:
    reason = f'{how}: it can not run as configured'
    return ExitDecision(DEAD, not optional, reason)
  if code == EXIT_CUT_OFF:
    return ExitDecision(DEAD, False, f'{how}: its steps are made, no syncer')
  if restarts >= restarts_max:
    reason = f'{how}; restarts used up ({restarts} of {restarts_max})'
    return ExitDecision(DEAD, not optional, reason)
  return ExitDecision(WAITING, False, f'{how}; restart {restarts + 1}')


def describe_exit(code: int) -> str:
  """Describes an exit code: 'exited with code 1', 'died of SIGKILL'."""
  if code >= 0:
    return f'exited with code {code}'
  return f'died of {signal.Signals(-code).name}'


def has_left(code: int) -> bool:
  """Returns True if it ended in good order: at the run's end, or as told to."""
  return code in (0, EXIT_STOPPED, -signal.SIGTERM)


def severity(code: int) -> int:
  """Returns the severity of an exit code.

  Of the processes of one role, the exit code of highest severity counts.
  """
  if code == EXIT_CONFIG:
    return 3
  if not has_left(code):
    return 2
  return 1 if code else 0


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
  state: str  # One of the states above.
  pid: int | None  # Of its first process; None unless running.
  starts: int


@dataclasses.dataclass(frozen=True)
class ProcessExit:
  """A process that was reaped."""

  process: str
  pid: int
  code: int  # −n: by signal n.


class RoleProcesses:
  """The processes of one role, which live and die together.

  A learner of several hosts is one computation: if one of its processes is
  dead, the others wait for it in a collective until a heartbeat is missed. So
  the first death ends all of them at once; nothing of theirs is worth saving. A
  process that leaves in good order gives the others time to do the same.

  Of a learner of several slices those that are left end by themselves, with
  their boundary in memory, and start again at once without the lost one. That
  is asked back later, by a file that the learner looks for at each boundary.

  Attributes:
    start_at_s: when they are started again, on the monotonic clock.

  Args:
    tell: is told what happens to each process.
    leave_s: how long the others may go on after one has left in good order.
  """

  def __init__(self, role: Role, tell: Tell, leave_s: float, delay_s: float):
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
    self.slices = LiveSlices(role.slices, delay_s)
    self.reforms = 0  # Starts that followed the end of a world in memory.
    self._memory: pathlib.Path | None = None
    self._coordination = Coordination(role.name)
    self._heartbeats: dict[str, Heartbeat] = {}  # Of slices' processes.
    self._standby: dict[int, subprocess.Popen] = {}  # By host.
    self._stand_by_at_s = float('inf')  # On the monotonic clock.

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
      last = self._coordinator
      while self._coordinator == last:  # Another one at each start.
        port = sockets.free_port(sockets.LOOPBACK)
        self._coordinator = sockets.join(sockets.LOOPBACK, port)
      environment = {**environment, GROUP_SECRET: secrets.token_hex(16)}
    self._exits.clear()
    self._told_to_leave = False
    self._leave_at_s = float('inf')
    live, sliced = self.slices.live, ()
    if role.slices > 1:
      self._wanted.unlink(missing_ok=True)
      self._stand_by_at_s = time.monotonic() + standby.AFTER_S
      sliced = str(self._in_memory()), self._coordinated(len(live))
    self.state = RUNNING
    self.starts += 1
    self._heartbeats.clear()
    for host in role.hosts_of(live):
      name = role.process(host)
      if role.slices > 1:
        slice_id, part = divmod(host, role.hosts // role.slices)
        path = self._in_memory() / alive_file(slice_id, part)
        self._heartbeats[name] = Heartbeat(path)
      command = role.command(host, self._coordinator, live, *sliced)
      own = {**environment, **role.variables(host)}
      self._running[name] = self._taken(host, command, own) or started(
        command, own, log(name)
      )
      detail = f'start {self.starts}'
      self._tell(name, 'started', self._running[name].pid, detail)

  def _taken(
    self, host: int, command: Sequence[str], environment: Mapping[str, str]
  ) -> subprocess.Popen | None:
    """Returns who stands by for a host, told to be its process; if any."""
    popen = self._standby.pop(host, None)
    own = {k: v for k, v in environment.items() if k == GROUP_SECRET}
    return popen if standby.becomes(popen, command, own) else None

  def stand_by(
    self, log: Callable[[str], pathlib.Path], environment: Mapping[str, str]
  ) -> None:
    """Starts a process that stands by for each host, once the world trains."""
    if self.state != RUNNING or time.monotonic() < self._stand_by_at_s:
      return
    self._stand_by_at_s = float('inf')
    for host in range(self.role.hosts):
      if host not in self._standby:
        self._standby[host] = started(
          standby.COMMAND,
          {**environment, **self.role.variables(host)},
          log(self.role.process(host)),
          stdin=subprocess.PIPE,
        )

  def send(self, number: signal.Signals, event: str, reason: str) -> None:
    """Signals all processes that run, each announced beforehand."""
    self._told_to_leave |= number == signal.SIGTERM
    for name, popen in self._running.items():
      self._tell(name, event, popen.pid, reason)
      signal_group(popen, number)

  def reap(self) -> list[ProcessExit]:
    """Notices exits, and ends all processes once one has ended.

    Returns:
      All exits in order once no process is left; they are returned once. The
      last of them has not been announced yet.
    """
    ended = [n for n, process in self._running.items() if has_exited(process)]
    for name in ended:
      self._reap_process(name)
    if self._running and ended:
      self._end_the_others()
    if self._running and time.monotonic() >= self._leave_at_s:
      self.kill('the others have left')
    if self._running or self.state != RUNNING:
      return []
    self.state = DEAD
    return list(self._exits)

  def reform(self, now_s: float) -> bool:
    """Goes on after a world of several slices, if one of them has its boundary
    in memory; returns whether it does.
    """
    role = self.role
    if role.slices == 1:
      return False
    codes = {end.process: end.code for end in self._exits}
    kept = {
      i: all(
        codes.get(role.process(host)) == EXIT_SLICES
        for host in role.hosts_of([i])
      )
      for i in self.slices.live
    }
    if not self.slices.re_forms(kept, self._wanted.exists(), now_s):
      return False
    self.reforms += 1
    self.state, self.start_at_s = WAITING, now_s
    return True

  def end_hung(self, now_s: float) -> None:
    """Kills processes of slices that have been silent for too long."""
    for name, popen in self._running.items():
      heartbeat = self._heartbeats.get(name)
      if heartbeat is not None and heartbeat.is_silent(now_s):
        del self._heartbeats[name]
        reason = f'SIGKILL: silent for {SILENT_S:g} s'
        self._tell(name, 'killed', popen.pid, reason)
        signal_group(popen, signal.SIGKILL)

  def ask_back(self, now_s: float) -> None:
    """Asks for a world with the slices that are to come back."""
    if self.state == RUNNING and self.slices.due(now_s):
      self._wanted.touch()

  def _coordinated(self, slices: int) -> str:
    """Returns where JAX's service is for the next world."""
    return self._coordination.serve(len(self.role.hosts_of(range(slices))))

  def forget(self) -> None:
    """Removes what is in memory; ends JAX's service, and who stands by."""
    self._coordination.end()
    for popen in self._standby.values():
      popen.kill()
      popen.wait()
    if self._memory is not None:
      shutil.rmtree(self._memory, ignore_errors=True)

  @property
  def _wanted(self) -> pathlib.Path:
    return self._in_memory() / WANTED

  def _in_memory(self) -> pathlib.Path:
    if self._memory is None:
      folder = SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else None
      self._memory = pathlib.Path(
        tempfile.mkdtemp(prefix=f'diloco-{self.role.name}-', dir=folder)
      )
    return self._memory

  def kill(self, reason: str) -> None:
    """Ends all processes at once, and reaps them."""
    self.send(signal.SIGKILL, 'stopped', f'SIGKILL: {reason}')
    for name in list(self._running):
      self._reap_process(name)

  def _end_the_others(self) -> None:
    """Kills the others after a death; after a departure, lets them leave."""
    worst = _worst(self._exits)
    if self.role.slices > 1 and not has_left(worst.code):
      end_at_s = time.monotonic() + WORLD_ENDS_S
      self._leave_at_s = min(self._leave_at_s, end_at_s)
      return
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
      signal_group(popen, signal.SIGKILL)
    ended = ProcessExit(name, popen.pid, popen.wait())
    del self._running[name]
    self._exits.append(ended)
    if self._running:
      self._tell(name, 'exited', ended.pid, describe_exit(ended.code))


def started(
  command: Sequence[str],
  environment: Mapping[str, str],
  log: pathlib.Path | None = None,
  stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen:
  """Starts a process in a group of its own, which dies with this one.

  Args:
    environment: all of it.
    log: the file that its output is added to; None: it goes where this
      process's goes.
  """
  with contextlib.ExitStack() as stack:
    output = {}
    if log is not None:
      log.parent.mkdir(parents=True, exist_ok=True)
      file = stack.enter_context(log.open('ab'))
      output = {'stdout': file, 'stderr': subprocess.STDOUT}
    return subprocess.Popen(
      dying_with_parent(command),
      stdin=stdin,
      env=dict(environment),
      process_group=0,
      **output,
    )


def _worst(exits: Sequence[ProcessExit]) -> ProcessExit:
  """Returns the one by which all processes of a role are judged."""
  return max(exits, key=lambda end: severity(end.code))


def has_exited(popen: subprocess.Popen) -> bool:
  """Returns True if a child has exited, without reaping it where possible."""
  if not hasattr(os, 'waitid'):  # macOS before Python 3.13.
    return popen.poll() is not None
  flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
  return os.waitid(os.P_PID, popen.pid, flags) is not None


def signal_group(popen: subprocess.Popen, number: signal.Signals) -> None:
  """Signals the group of a child that was not reaped yet."""
  # Without rights or members: only a zombie is left of the group.
  with contextlib.suppress(ProcessLookupError, PermissionError):
    os.killpg(popen.pid, number)


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
      role.name: RoleProcesses(role, self._tell, linger_s, restart_delay_s)
      for role in roles
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
    for group in self._groups.values():
      group.forget()

  @property
  def is_over(self) -> bool:
    """Returns True if the run failed, or nothing runs or will be started."""
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
      group.end_hung(time.monotonic())
      group.ask_back(time.monotonic())
      group.stand_by(self._log, self._environment)
      is_due = time.monotonic() >= group.start_at_s
      if group.state == WAITING and is_due and not self.failure:
        group.start(self._log, self._environment)

  def slices(self, name: str) -> list[int]:
    """Returns the slices of a role that take part, or are about to."""
    return self._groups[name].slices.live

  def keep_away(self, name: str) -> None:
    """Takes none of a role's slices back until `take_back`."""
    self._groups[name].slices.keep_away()

  def take_back(self, name: str) -> None:
    """Has the slices of a role that are away take part from now on."""
    self._groups[name].slices.take_back()

  def is_running(self, name: str) -> bool:
    return self._groups[name].state == RUNNING

  def send(
    self, name: str, number: signal.Signals, event: str, reason: str
  ) -> None:
    """Signals a running role; the event is announced beforehand."""
    group = self._groups[name]
    assert group.state == RUNNING, f'{name} is not running'
    group.send(number, event, reason)

  def kill(self, name: str, reason: str) -> None:
    """SIGKILL for a running role, announced beforehand."""
    self.send(name, signal.SIGKILL, 'killed', reason)

  def terminate(self, name: str, reason: str) -> None:
    """SIGTERM for a running role, announced beforehand; it is restarted."""
    self.send(name, signal.SIGTERM, 'stopped', reason)

  def add(self, role: Role) -> None:
    """Adds a role, or one that is dead; it is started at the next `poll`."""
    old = self._groups.get(role.name)
    assert old is None or old.state == DEAD, f'a name twice: {role.name}'
    self._dismissed.discard(role.name)
    if old is not None:
      old.forget()
    self._groups[role.name] = RoleProcesses(
      role, self._tell, self._linger_s, self._restart_delay_s
    )

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
          last = ended[-1]
          how = describe_exit(last.code)
          self._tell(last.process, 'exited', last.pid, how)
      time.sleep(POLL_S)

  def _judge(self, group: RoleProcesses, ended: list[ProcessExit]) -> None:
    """Decides what becomes of processes that have ended."""
    judged, last = _worst(ended), ended[-1]
    if group.role.name in self._dismissed and has_left(judged.code):
      group.state = DEAD
      how = describe_exit(last.code)
      self._tell(last.process, 'exited', last.pid, f'{how}; {DISMISSED}')
      return
    is_over = self._stop_at_s is not None
    if not is_over and group.reform(time.monotonic()):
      live = ', '.join(map(str, group.slices.live))
      how = f'{describe_exit(last.code)}; goes on with slices {live}'
      self._tell(last.process, 'exited', last.pid, how)
      return
    decision = after_exit(
      judged.code,
      group.starts - 1 - group.reforms,
      self._restarts_max,
      is_over,
      group.role.optional,
    )
    group.state = decision.state
    group.start_at_s = time.monotonic() + self._restart_delay_s
    line = f'{judged.process} {decision.reason}'
    if decision.stops_run and not self.failure:
      self.failure = line
    is_of_last = judged is last or judged.code == last.code == 0
    detail = decision.reason if is_of_last else line
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
