# SPDX-License-Identifier: Apache-2.0
"""Trains on one machine: starts a syncer and M learners, keeps them alive.

A run that was stopped goes on where the same command is given again; one that
is over goes on with a larger --config.protocol.total_steps.

  python -m launch.local --config=experiments/NAME.py --workdir=DIR \\
    [--config.a.b=c ...] [--overwrite] [--tls_ca=… --token_file=… …] \\
    [--hosts=2,1] [--cpu_devices | --chips_per_learner=N] [--log_json] \\
    [--metrics_port=9100]
  python -m launch.local --config=experiments/NAME.py --workdir=DIR \\
    --sweep[=KEY=V1,V2,…] [--seeds=3] [--only=TEXT]

The second makes the runs of the file's `sweep(add)`, or of some values of one
key, each with several seeds, one run at a time, and compares them; given again,
it goes on.

Exit code 0: the run finished and was evaluated; 78: it can't run as
configured; 1: it failed; 130, 143: Ctrl-C, SIGTERM.
"""

import collections
import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import pathlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import rich.console
from absl import flags as absl_flags

from diloco.config import flags, lab_section, run_config
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
  read_status,
  read_summary,
)
from diloco.metrics.workdir import Workdir, folder_at
from diloco.sweeps import making
from diloco.watch import run_page
from launch import chips, epochs, preflight, progress
from launch import program as launch_program
from launch.chips import LocalDevices
from launch.preflight import check_metrics_ports, free_address
from launch.program import Program, Role, local_environment, program
from launch.progress import Display
from launch.supervisor import ProcessEvent, Supervisor

POLL_S = 0.1
LOG_LINES = 20  # Of a process that stopped the run.

# Locks a run's folder, and checks that it belongs to this run.


def occupy(
  root: pathlib.Path, overwrite: bool, config: RunConfig | None = None
) -> tuple[Workdir, BinaryIO, bool]:
  """The folder of a run that starts, or goes on; held while the file is open.

  A run that was stopped goes on: its processes find what they left there.

  Args:
    root: is created where it does not exist.
    overwrite: removes the run that `root` and its `checkpoint.folder` hold, and
      nothing else.
    config: of the run that is to be started; None: it begins anew, always.

  Returns:
    The folder, the open lock, and whether the folder's run goes on.

  Raises:
    ConfigError: the folder is in use, or holds something else: another run,
      one that is over, or no run at all.
  """
  folder = folder_at(config.checkpoint.folder) if config else None
  workdir, flag = Workdir(root, folder), f'--workdir={root}'
  if root.exists() and not root.is_dir():
    raise ConfigError([f'{flag}: is a file, give a folder'])
  with flags.refusing(OSError, flag=f'{flag}: no run can be kept there'):
    root.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in root.iterdir()}
    if foreign := sorted(n for n in names if not Workdir.owns(n)):
      raise ConfigError(
        [
          f'{flag}: holds {foreign[0]!r}, which is not of a run; give an empty '
          'folder or one that does not exist'
        ]
      )
    lock = workdir.lock.open('ab')
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    lock.close()
    raise ConfigError(
      [
        f'{flag}: another launcher is running there; wait for it or give '
        'another folder'
      ]
    ) from None
  held = names - {workdir.lock.name}
  reason = _why_not_go_on(workdir, config) if held else None
  if reason and has_begun(workdir) and not overwrite:
    lock.close()
    raise ConfigError(
      [
        f'{flag}: {reason}; give another folder, or --overwrite to remove that '
        'run'
      ]
    )
  if overwrite or reason:
    for path in map(root.joinpath, held):
      is_folder = path.is_dir() and not path.is_symlink()
      (shutil.rmtree if is_folder else pathlib.Path.unlink)(path)
    held = set()
  for path in workdir.saved() if overwrite else ():
    path.rmtree() if hasattr(path, 'rmtree') else shutil.rmtree(path)
  return workdir, lock, bool(held)


def has_begun(workdir: Workdir) -> bool:
  """Returns False for a folder with no more than a start that failed.

  There is nothing to go on with, and the next start may be of another run.
  """
  left = (
    workdir.summary,
    workdir.evaluation,
    workdir.result,
    workdir.parameters,
    workdir.chaos,
    *workdir.saved(),
    *Workdir(workdir.root).saved(),  # Of a run that kept them there.
  )
  if any(path.exists() for path in left):
    return True
  try:
    status = read_status(workdir.status)
  except files.MalformedFile:
    return True  # Something has been there.
  return status is not None and status.step > 0


def _why_not_go_on(workdir: Workdir, config: RunConfig | None) -> str | None:
  """Returns why the folder's run is not the one to start; None where it is."""
  if config is None:
    return 'already holds a run'
  try:
    theirs = run_config.restore(json.loads(workdir.config.read_text()))
  except (OSError, ValueError) as error:
    return f'holds a run of which the configuration is not known ({error})'
  here, there = (
    {**run_config.agreement(x), 'name': x.name} for x in (config, theirs)
  )
  longer = run_config.extended(here, there)
  if differing := run_config.differences(here, longer):
    return f'holds another run, with {differing}'
  if config.checkpoint.folder != theirs.checkpoint.folder:
    return f'holds a run with checkpoint.folder={theirs.checkpoint.folder!r}'
  is_over = workdir.summary.exists() and workdir.evaluation.exists()
  if longer == there and is_over:
    steps = theirs.protocol.total_steps
    return (
      f'holds a run that is over; --config.protocol.total_steps above {steps} '
      'extends it'
    )
  return None


def lacks_evaluation(workdir: Workdir, config: RunConfig) -> bool:
  """Returns True if a run that goes on has made all its steps before."""
  if not workdir.summary.exists():
    return False
  theirs = run_config.restore(json.loads(workdir.config.read_text()))
  return theirs.protocol.total_steps == config.protocol.total_steps


def still_due(
  kills: Sequence[Kill], config: RunConfig, workdir: Workdir
) -> tuple[Kill, ...]:
  """Returns the faults that a resumed run has not reached yet."""
  try:
    status = read_status(workdir.status)
  except files.MalformedFile:  # A view of the run; the syncer writes it anew.
    status = None
  step = status.step if status else 0
  total_steps = config.protocol.total_steps
  return tuple(kill for kill in kills if not kill.is_due(step, total_steps))


# One run from its first process to the table at its end.


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
    """Returns the syncer's last status; reports and ignores a broken one."""
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
  if warning := epochs.over_fitted(workdir):
    console.print(warning, style='yellow', highlight=False, soft_wrap=True)


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


# The command.


def define_flags() -> None:
  """The flags of this main."""
  flags.define_flags()
  flags.define_access_flags()
  flags.define_log_flags()
  absl_flags.DEFINE_string(
    'workdir', None, 'Folder of the run: logs, metrics, parameters.'
  )
  absl_flags.DEFINE_bool(
    'overwrite',
    False,
    'Removes the run that the workdir holds, and begins anew.',
  )
  absl_flags.DEFINE_bool('page', False, 'Gone: diloco watch RUN has the page.')
  absl_flags.DEFINE_string(
    'hosts',
    '1',
    'Processes of each learner: one number for all, or one for each, such as '
    '2,1.',
  )
  absl_flags.DEFINE_bool(
    'cpu_devices', False, 'Makes the devices of config.mesh out of CPU cores.'
  )
  absl_flags.DEFINE_integer(
    'chips_per_learner',
    None,
    'TPU chips or GPUs of this machine for each learner, as config.mesh has '
    'them; 0: each process sees all. Default: they are dealt where JAX can '
    'use them and there are several learners.',
    lower_bound=0,
  )
  absl_flags.DEFINE_multi_string(
    'env',
    [],
    'NAME=VALUE for all processes, or ROLE:NAME=VALUE, as learner:X=1.',
  )
  absl_flags.DEFINE_string(
    'device_root', '/', 'Folder whose dev and sys tell of accelerators.'
  )
  absl_flags.DEFINE_integer(
    'metrics_port',
    0,
    'First of the loopback ports at which processes serve /metrics and '
    '/status; 0: nowhere.',
    0,
    65535,
  )


def read_program(
  config: RunConfig,
  workdir: Workdir,
  address: str,
  arguments: Sequence[str] | None = None,
) -> Program:
  """The processes that the parsed flags ask for.

  Args:
    arguments: give them their configuration; None: those of the command line.

  Raises:
    ConfigError: they can not be.
  """
  values = absl_flags.FLAGS
  learners = launch_program.on_this_machine(
    config,
    values.hosts,
    values.cpu_devices,
    os.environ.get(launch_program.XLA_FLAGS, ''),
  )
  devices = accelerators(config)
  if devices is None:  # Else what is dealt has to suit the mesh.
    root = pathlib.Path(values.device_root)
    preflight.check_devices(config, learners, os.environ, root)
  whole = program(
    config,
    flags.arguments() if arguments is None else arguments,
    workdir,
    address,
    flags.access_arguments(),
    flags.log_arguments(),
    learners,
    values.metrics_port,
    values.env,
  )
  return chips.dealt(whole, config, devices, os.environ) if devices else whole


def accelerators(config: RunConfig) -> LocalDevices | None:
  """Returns the accelerators that the parsed flags deal to learners.

  Raises:
    ConfigError: they can not be.
  """
  values = absl_flags.FLAGS
  asked = values.chips_per_learner
  if values.cpu_devices and asked:
    raise ConfigError(
      [f'--chips_per_learner={asked}: --cpu_devices makes devices of CPU cores']
    )
  if values.cpu_devices:
    return None
  root = pathlib.Path(values.device_root)
  return chips.to_be_dealt(config, asked, os.environ, root)


def checked(argv: Sequence[str]) -> RunConfig:
  """The configuration of the parsed flags, of which all is there.

  Raises:
    ConfigError: data, a package, a module or a file is not, or a flag.
  """
  config = flags.load()
  check_arguments(argv)
  preflight.check(config)
  return config


def check_arguments(argv: Sequence[str]) -> None:
  """Looks at what stands beside the configuration.

  Raises:
    ConfigError: --workdir is missing, or there is more than flags.
  """
  if len(argv) > 1:
    raise ConfigError([f'{argv[1]}: unexpected argument'])
  if not absl_flags.FLAGS.workdir:
    raise ConfigError(['--workdir: is missing, such as runs/first'])


def main(argv, on_begin: Callable[[], None] = lambda: None) -> int:
  """Makes the run.

  Args:
    on_begin: called once the folder is this run's.
  """
  config, values = checked(argv), absl_flags.FLAGS
  if values.page:
    print(
      f'note: --page is gone: diloco watch {values.workdir}', file=sys.stderr
    )
  address = free_address(config.transport.host, config.transport.port)
  root = pathlib.Path(values.workdir)
  parts = read_program(config, Workdir(root), address)
  if values.metrics_port:
    check_metrics_ports(parts.roles)
  workdir, lock, goes_on = occupy(root, values.overwrite, config)
  with flags.refusing(OSError, flag=f'--workdir={root}'):
    on_begin()
  console = rich.console.Console()
  with lock:
    return make(config, parts, workdir, address, goes_on, console)


def make(
  config: RunConfig,
  parts: Program,
  workdir: Workdir,
  address: str,
  goes_on: bool,
  console: rich.console.Console,
  tell: Callable[[str], None] | None = None,
) -> int:
  """Says how a run begins, and makes it; returns the launcher's exit code.

  A run that goes on has some faults behind it, and perhaps all of its steps.

  Args:
    tell: takes a line on the progress now and then.
  """
  planned = lab_section.plan(config.faults, config.protocol.learners)
  say, trains = functools.partial(progress.say, console), True
  if devices := accelerators(config):
    say(chips.chips_of(parts, devices))
  if goes_on:
    say(f'goes on with the run in {workdir.root}')
    planned = still_due(planned, config, workdir)
    trains = not lacks_evaluation(workdir, config)
    if trains:  # There it is if the run was over: now it is longer.
      workdir.summary.unlink(missing_ok=True)
    workdir.evaluation.unlink(missing_ok=True)
    workdir.result.unlink(missing_ok=True)
  if trains:
    if read := epochs.line(config):
      say(read)
    say(f'the syncer listens at {address}')
    if parts.roles[0].metrics_port:
      say(launch_program.metrics_line(parts))
  else:
    say('all steps are made, the evaluation is not')
  return run(config, parts, workdir, planned, console, trains, tell)


if __name__ == '__main__':
  define_flags()
  making.define_flags()
  flags.define_short_flags()
  sys.argv = flags.in_full(making.spelled_out(sys.argv))

  def main_or_sweep(argv) -> int:
    """Makes the run, or the sweep, that the flags ask for."""
    if not making.is_asked():
      return main(argv)
    # Only now: it imports SciPy.
    from launch import real_sweep

    return real_sweep.main(argv)

  flags.run(main_or_sweep)
