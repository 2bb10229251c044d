# SPDX-License-Identifier: Apache-2.0
"""One local run from its first process to the table at its end."""

import collections
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import rich.console

from diloco.config.lab_section import Kill
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.metrics import files, token_ledger
from diloco.metrics.jsonl import CorruptLine, JsonLines
from diloco.metrics.recorded_run import FollowedRun
from diloco.metrics.status import (
  RunStatus,
  of_run,
  read_evaluation,
  read_summary,
)
from diloco.metrics.workdir import Workdir
from diloco.watch import run_page
from launch import epochs, progress
from launch.parent_death import dying_with_parent
from launch.program import Program, Role, local_environment
from launch.progress import Display
from launch.supervisor import ProcessEvent, Supervisor

POLL_S = 0.1
LOG_LINES = 20  # Of a process that stopped the run.


class RunFailed(Exception):
  """The run did not come to its end; the message says why."""


class Interrupted(Exception):
  """Ctrl-C or SIGTERM."""

  def __init__(self, number: int):
    self.number = number
    super().__init__(f'stopped by {signal.Signals(number).name}')


def run(
  config: RunConfig,
  program: Program,
  workdir: Workdir,
  faults: Sequence[Kill],
  console: rich.console.Console,
  trains: bool = True,
  tell: Callable[[str], None] | None = None,
) -> int:
  """Trains, evaluates, reports; returns the exit code of the launcher.

  Args:
    trains: False for a run that is over, and was not evaluated.
    tell: takes a line on the progress now and then.

  0: the run finished and was evaluated. 1: it did not; the reason and the
  last log lines were shown. 128 + n: stopped by signal n. No process is left
  in any case.
  """
  try:
    files.write_json(workdir.config, dataclasses.asdict(config))
    with signals() as received:
      session = _Session(config, program, workdir, console, received)
      if trains:
        session.train(faults, tell)
      session.evaluate()
    _show_end(config, workdir, console)
  except Interrupted as stopped:
    goes_on = f'the same command goes on with the run in {workdir.root}'
    progress.say(console, f'{stopped}; no process is left; {goes_on}')
    return 128 + stopped.number
  except (RunFailed, files.MalformedFile, CorruptLine, OSError) as error:
    progress.say(console, f'failed: {error}')
    return 1
  return 0


class _Session:
  """The common part of training and evaluation."""

  def __init__(
    self,
    config: RunConfig,
    program: Program,
    workdir: Workdir,
    console: rich.console.Console,
    received: list[int],
  ):
    self._config = config
    self._program = program
    self._workdir = workdir
    self._console = console
    self._received = received  # Signals, as they come.
    self._pids: dict[str, int] = {}
    self._status_is_broken = False
    self._events = JsonLines(workdir.events)

  def train(
    self, faults: Sequence[Kill], tell: Callable[[str], None] | None = None
  ) -> None:
    """Runs until the syncer has finished and every learner has left."""
    restarts_max = self._config.run.restarts_max
    pending = list(faults)
    with Display(self._console, tell) as display:
      roles = self._program.roles
      running = self._supervisor(display, roles, restarts_max)
      try:
        with running:
          for _ in self._until_over(running):
            status = self._status(display)
            if status is not None:
              pending = _perform(pending, status.step, self._config, running)
            display.update(status, running.states())
      finally:  # However it ended, the last picture shows what is left.
        display.show(self._status(display), running.states())
      for kill in pending:
        display.say(f'not performed, the run was over: {kill}')
    if read_summary(self._workdir.summary) is None:
      raise RunFailed(f'the syncer left no {self._workdir.summary}')

  def evaluate(self) -> None:
    """Runs the evaluation once, unless the evaluator has made it."""
    with contextlib.suppress(files.MalformedFile):
      if read_evaluation(self._workdir.evaluation) is not None:
        return
    roles = (self._program.evaluate,)
    with (
      Display(self._console) as display,
      self._supervisor(display, roles, restarts_max=0) as running,
    ):
      for _ in self._until_over(running):
        pass
    if read_evaluation(self._workdir.evaluation) is None:
      raise RunFailed(f'no {self._workdir.evaluation} was written')

  def _status(self, display: Display) -> RunStatus | None:
    """Returns the syncer's last status; a broken one is reported and
    ignored.
    """
    try:
      return of_run(self._workdir)
    except files.MalformedFile as error:
      if not self._status_is_broken:
        display.say(f'no status until the syncer writes the next: {error}')
      self._status_is_broken = True
      return None

  def _supervisor(
    self, display: Display, roles: Sequence[Role], restarts_max: int
  ) -> Supervisor:
    def announce(event: ProcessEvent) -> None:
      self._record(event)
      display.say(
        f'{event.process} ({event.pid}) {event.event}: {event.detail}'
      )

    return Supervisor(
      roles,
      log=self._workdir.log,
      environment=local_environment(self._program, os.environ),
      restarts_max=restarts_max,
      restart_delay_s=self._config.run.restart_delay_s,
      announce=announce,
      hurry=lambda: len(self._received) > 1,
    )

  def _until_over(self, running: Supervisor) -> Iterator[None]:
    """Polls, and yields in between; raises for a failure or a signal."""
    while True:
      if self._received:
        raise Interrupted(self._received[0])
      running.poll()
      if running.failure:
        raise RunFailed(f'{running.failure}{self._last_lines(running.failure)}')
      if running.is_over:
        return
      yield
      time.sleep(POLL_S)

  def _record(self, event: ProcessEvent) -> None:
    """Writes one line of events.jsonl, and the running processes."""
    self._events.append(json.dumps(dataclasses.asdict(event)).encode())
    if event.event == 'started':
      self._pids[event.process] = event.pid
    elif event.event == 'exited':
      self._pids.pop(event.process, None)
    pids = {'launcher': os.getpid(), 'processes': self._pids}
    try:
      files.write_json(self._workdir.pids, pids)
    except OSError as error:
      progress.say(
        self._console, f'{self._workdir.pids} is not written: {error}'
      )

  def _last_lines(self, failure: str) -> str:
    """The end of the log of the process that a failure begins with."""
    path = self._workdir.log(failure.partition(' ')[0])
    if not path.exists():
      return ''
    with path.open(errors='replace') as file:
      lines = collections.deque(file, maxlen=LOG_LINES)
    return f'\nthe end of {path}:\n' + ''.join(f'  {text}' for text in lines)


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
  """Collects the signals that ask the launcher to stop.

  They raise nothing: an exception between a fork and its bookkeeping would
  leave a process behind.
  """
  received: list[int] = []
  asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
  before = {
    number: signal.signal(number, lambda n, frame: received.append(n))
    for number in asked
  }
  try:
    yield received
  finally:
    for number, action in before.items():
      signal.signal(number, action)


def _perform(
  pending: Sequence[Kill], step: int, config: RunConfig, running: Supervisor
) -> list[Kill]:
  """Kills what is due and runs; returns what is still to come."""
  left = []
  for kill in pending:
    is_due = kill.is_due(step, config.protocol.total_steps)
    if is_due and running.is_running(kill.process):
      reason = f'SIGKILL at global step {step}, planned in config.faults'
      running.kill(kill.process, reason)
    else:
      left.append(kill)
  return left


def _show_end(
  config: RunConfig, workdir: Workdir, console: rich.console.Console
) -> None:
  status, evaluation = of_run(workdir), read_evaluation(workdir.evaluation)
  place = _draw_loss(workdir)
  tokens = token_ledger.rows_of(
    workdir, config.protocol.fragments, config.protocol.blend
  )
  view = progress.report(workdir, status, evaluation, place, tokens.values())
  console.print(view)
  if said := epochs.over_fitted(workdir):
    console.print(said, style='yellow', highlight=False, soft_wrap=True)


def _draw_loss(workdir: Workdir) -> str:
  """Writes the first chart of the run's page as PNG; returns where it is."""
  try:
    from diloco.pages import figures  # Matplotlib is an extra.
  except ImportError as error:
    return f'none, {error.name} is missing: pip install {error.name}'
  run = FollowedRun(workdir.root)
  run.update()
  figures.save(run_page.loss_chart([run], run.label), workdir.loss_plot)
  return str(workdir.loss_plot)


@contextlib.contextmanager
def page(
  workdir: Workdir, port: int, console: rich.console.Console
) -> Iterator[None]:
  """Serves the page of a run in a process of its own; says where.

  Raises:
    ConfigError: it can't be served there.
  """
  command = [sys.executable, '-m', 'diloco.watch', str(workdir.root)]
  serving = subprocess.Popen(
    dying_with_parent([*command, f'--port={port}']),
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,  # Ctrl-C is for the launcher.
  )
  with serving:
    try:
      said = ''
      for said in serving.stdout:  # A library's warning may come before it.
        if found := re.search(r'http://\S+', said):
          break
      else:
        raise ConfigError([f'--page: {said.removeprefix("error: ").strip()}'])
      progress.say(console, f'page: {found[0]}')
      yield
    finally:
      serving.terminate()
