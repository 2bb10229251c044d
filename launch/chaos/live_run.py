# SPDX-License-Identifier: Apache-2.0
"""A run of real processes, followed from outside by the files that it writes.

Nothing here knows how the processes work: they are started by their command
lines, and what they did is read from their files and from the times at which
they started and ended.
"""

import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from diloco.config.run_config import RunConfig
from diloco.metrics import files, names
from diloco.metrics.jsonl import Tail
from diloco.metrics.workdir import Workdir, learner_name
from launch.preflight import free_address
from launch.program import Program, Role, program
from launch.session import RunFailed
from launch.supervisor import ProcessEvent, Supervisor

# They would lead a process past the proxy that it was given.
PASS_BY = ('no_proxy', 'NO_PROXY', 'no_grpc_proxy')
POLL_S = 0.02
RESTARTS_MAX = 1_000_000  # Here deaths are the point.


class Overdue(Exception):
  """An awaited event did not come in time."""


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenStep:
  """One inner step, as a learner recorded it."""

  time_s: float  # When it was written; seconds since the epoch.
  incarnation: int
  step: int  # 1 after the first of a process.
  step_s: float
  stall_s: float


class LiveRun:
  """Processes of one run; leaving the `with` block stops them all.

  Attributes:
    supervisor: of the processes; kills and pauses go through it.
    tape: the syncer's decisions so far.
    steps: learner id -> its steps so far, over all its processes.
    events: what happened to processes so far.

  Args:
    config: with `log_every_steps` = 1, or `steps` has gaps.
    config_arguments: the flags that give a process this configuration.
    workdir: occupied, empty.
    restart_delay_s: between a death and the restart.
    announce: is told every event.
    on_poll: called whenever the processes have been looked at.
    parts: takes the syncer's address and returns the processes; None: those of
      the configuration.
  """

  def __init__(
    self,
    config: RunConfig,
    config_arguments: Sequence[str],
    workdir: Workdir,
    restart_delay_s: float,
    announce: Callable[[ProcessEvent], None],
    on_poll: Callable[[], None] = lambda: None,
    parts: Callable[[str], Program] | None = None,
  ):
    self.config = config
    self.workdir = workdir
    self.learners = range(config.protocol.learners)
    self.tape: list[dict] = []
    self.steps: dict[int, list[WrittenStep]] = {m: [] for m in self.learners}
    self.events: list[ProcessEvent] = []
    self.address = free_address(config.transport.host, config.transport.port)
    self._announce = announce
    self._on_poll = on_poll
    self._tape_tail = Tail(workdir.tape)
    self._step_tails = {
      m: Tail(workdir.metrics(learner_name(m))) for m in self.learners
    }
    if parts is None:
      made = program(config, config_arguments, workdir, self.address)
    else:
      made = parts(self.address)
    files.write_json(workdir.config, dataclasses.asdict(config))
    self.supervisor = Supervisor(
      made.roles,
      log=workdir.log,
      environment={
        **{k: v for k, v in os.environ.items() if k not in PASS_BY},
        **dict(made.environment),
      },
      restarts_max=RESTARTS_MAX,
      restart_delay_s=restart_delay_s,
      announce=self._on_event,
    )

  def __enter__(self) -> 'LiveRun':
    return self

  def __exit__(self, *exception) -> None:
    self.supervisor.stop()

  def poll(self) -> None:
    """Restarts what is due and reads what is new.

    Raises:
      RunFailed: the supervisor has given up.
    """
    self.supervisor.poll()
    if self.supervisor.failure:
      raise RunFailed(self.supervisor.failure)
    self.read()
    self._on_poll()

  def read(self) -> None:
    """Reads what the processes have written since the last time."""
    self.tape += self._tape_tail.new_records()
    for m, tail in self._step_tails.items():
      self.steps[m] += map(written_step, tail.new_records())

  def add_learner(self, learner: int, role: Role) -> None:
    """Starts a learner beyond M at the next `poll`, and reads its steps."""
    self.steps[learner] = []
    self._step_tails[learner] = Tail(
      self.workdir.metrics(learner_name(learner))
    )
    self.supervisor.add(role)

  def kill_host(self, process: str, reason: str) -> None:
    """SIGKILL for one process of a role, which is running."""
    pid = next(
      event.pid
      for event in reversed(self.events)
      if event.process == process and event.event == 'started'
    )
    # It is a child that is reaped by `poll` only: no other can have its pid.
    self._on_event(ProcessEvent(time.time(), process, 'killed', pid, reason))
    os.kill(pid, signal.SIGKILL)

  def until(
    self, holds: Callable[[], bool], deadline_s: float, what: str
  ) -> None:
    """Polls until `holds()`; raises `Overdue` where it never does."""
    give_up_at_s = time.monotonic() + deadline_s
    while True:
      self.poll()
      if holds():
        return
      if time.monotonic() >= give_up_at_s:
        raise Overdue(f'not within {deadline_s:.0f} s: {what}')
      time.sleep(POLL_S)  # Between two polls, at which the supervisor acts.

  def spend(self, seconds: float) -> None:
    """Lets time pass, polling."""
    over_at_s = time.monotonic() + seconds
    while (left_s := over_at_s - time.monotonic()) > 0:
      self.poll()
      time.sleep(min(POLL_S, left_s))

  def merges(self, since_s: float, learner: int | None = None) -> list[dict]:
    """Closed rounds at or after a time; all, or those with one learner."""
    found = []
    for line in reversed(self.tape):  # Asked for often, and for the end.
      if line['time_s'] < since_s:
        break
      if line['kind'] == 'Publish' and (
        learner is None or learner in participants(line)
      ):
        found.append(line)
    return found[::-1]

  def all_merge(self, since_s: float) -> bool:
    """Returns True if every learner was merged since then and since its
    start.
    """
    last = {event.process: event for event in self.events}
    for m in self.learners:
      event = last.get(learner_name(m))
      if event is None or event.event in ('killed', 'exited'):
        return False
      started_s = event.time_s if event.event == 'started' else since_s
      if not self.merges(max(since_s, started_s), m):
        return False
    return True

  def _on_event(self, event: ProcessEvent) -> None:
    self.events.append(event)
    with self.workdir.events.open('a') as file:
      file.write(json.dumps(dataclasses.asdict(event)) + '\n')
    self._announce(event)


def participants(publish: Mapping) -> set[int]:
  """The learners that a closed round of the tape has merged."""
  return {share['learner'] for share in publish['shares']}


def written_step(record: Mapping) -> WrittenStep:
  """Returns a line of a learner's metrics as a step."""
  return WrittenStep(
    time_s=record[names.TIME],
    incarnation=int(record[names.INCARNATION]),
    step=record['step'],
    step_s=record[names.STEP_TIME],
    stall_s=record[names.STALL_TIME],
  )
