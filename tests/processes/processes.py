# SPDX-License-Identifier: Apache-2.0
"""Real processes of a run for the tests: started, watched, always ended."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from diloco.metrics.jsonl import Tail
from diloco.metrics.workdir import Workdir, learner_name, shard_name
from diloco.transport.sockets import free_port
from launch.parent_death import dying_with_parent
from tests.waiting import until

REPOSITORY = pathlib.Path(__file__).parents[2]
EXIT_CONFIG = 78
LOOK_EVERY_S = 0.05
START_S = 240.0  # Until a process is where it can do its part, uncached.
TAIL_LINES = 25  # Of each log, shown where a test fails.

# Steps that are slept out, so that something can happen between two while the
# machine is free for what starts. Their shape is the tiny one of all tests:
# they share what they compile.
SLOW = ('run.step_floor_s=0.04', 'data.shards=4')
ENDLESS = ('protocol.total_steps=1000000',)  # The test ends the run.


class Running:
  """A process that was started; its stdout and stderr go to `log`."""

  def __init__(self, name: str, popen: subprocess.Popen, log: pathlib.Path):
    self.name = name
    self.log = log
    self._popen = popen

  @property
  def exit_code(self) -> int | None:
    """None while it lives, also where it is stopped; −n: died of signal n."""
    return self._popen.poll()

  @property
  def pid(self) -> int:
    return self._popen.pid

  @property
  def output(self) -> str:
    return self.log.read_text(errors='replace')

  @property
  def errors(self) -> list[str]:
    """The lines that tell a user what is wrong."""
    return re.findall(r'^error: .*', self.output, re.MULTILINE)

  def send(self, number: signal.Signals):
    """Sends a signal to this very process, where it still lives."""
    self._popen.send_signal(number)

  def end(self):
    """SIGKILL, which a stopped process hears too."""
    self._popen.kill()
    self._popen.wait()


class Processes:
  """The processes of one run; leaving the `with` block kills what it started.

  Args:
    root: an empty folder of this test. What its processes compile is shared
      with the tests of the whole suite (tests/run.sh), or else with those of
      the pytest session.
    *overrides: of the tiny configuration, such as 'protocol.quorum=2'.
  """

  def __init__(self, root: pathlib.Path, *overrides: str):
    self.workdir = Workdir(root / 'run')
    self.workdir.root.mkdir()
    self._logs = root / 'output'
    self._logs.mkdir()
    self._overrides = overrides
    self.running: list[Running] = []
    self._records: dict[pathlib.Path, tuple[Tail, list[dict]]] = {}
    self._address: str | None = None
    self.module = 'diloco.learner'  # That learners run.
    self.environment = os.environ | {
      'JAX_PLATFORMS': 'cpu',
      'JAX_COMPILATION_CACHE_DIR': os.environ.get(
        'JAX_COMPILATION_CACHE_DIR', str(root.parent / 'compiled')
      ),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      'NPROC': '2',
      'PYTHONUNBUFFERED': '1',
    }

  def __enter__(self) -> 'Processes':
    return self

  def __exit__(self, *exception):
    for running in self.running:
      running.end()

  # Starting -----------------------------------------------------------------

  def start(
    self,
    name: str,
    module: str,
    *flags: str,
    environment: Mapping[str, str] | None = None,
  ) -> Running:
    """Starts `python -m module` with the run's configuration and `flags`."""
    return self.start_without_config(
      name,
      module,
      '--config=experiments/tests_tiny.py',
      *(f'--config.{override}' for override in self._overrides),
      *flags,
      environment=environment,
    )

  def start_without_config(
    self,
    name: str,
    module: str,
    *flags: str,
    environment: Mapping[str, str] | None = None,
  ) -> Running:
    """Starts `python -m module` in the run's folder with `flags` only."""
    log = self._logs / f'{name}.log'
    command = [
      *(sys.executable, '-m', module),
      f'--workdir={self.workdir.root}',
      *flags,
    ]
    with log.open('wb') as file:
      popen = subprocess.Popen(
        dying_with_parent(command),
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        env=self.environment | dict(environment or {}),
      )
    self.running.append(Running(name, popen, log))
    return self.running[-1]

  def syncer(self, *flags: str, name: str = 'syncer') -> Running:
    """Starts a syncer, later ones on the same port; waits until it listens."""
    address = self._address or f'127.0.0.1:{free_port()}'
    bind = f'--bind={address}'
    syncer = self.start(name, 'diloco.syncer', bind, *flags)
    self.until(lambda: self._listens(syncer), START_S, 'the syncer listens')
    return syncer

  def syncer_again(self, name: str) -> Running:
    """Starts a syncer where the first listened, and does not wait for it."""
    return self.start(name, 'diloco.syncer', f'--bind={self._address}')

  def shard(self, shard: int, name: str | None = None) -> Running:
    """Starts a shard beside the syncer that listens."""
    return self.start(
      name or shard_name(shard),
      'diloco.syncer_shard',
      f'--shard={shard}',
      f'--leader={self._address}',
    )

  def learner(
    self,
    learner: int,
    *overrides: str,
    name: str | None = None,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
  ) -> Running:
    """Starts a learner of the syncer; `overrides` are its own."""
    return self.start(
      name or learner_name(learner),
      self.module,
      f'--learner={learner}',
      f'--syncer={self._address}',
      *(f'--config.{override}' for override in overrides),
      *flags,
      environment=environment,
    )

  def host(
    self,
    learner: int,
    host: int,
    hosts: int,
    port: int,
    devices: int,
    environment: Mapping[str, str],
    overrides: Sequence[str] = (),
  ) -> Running:
    """Starts one host of a learner, which meets the others at a local port.

    Args:
      learner: its id.
      host: its number.
      hosts: of the learner.
      port: of the coordinator.
      devices: of the learner.
      environment: its own.
      overrides: its own.
    """
    return self.learner(
      learner,
      *overrides,
      name=f'learner-{learner}-host-{host}-{len(self.running)}',
      flags=(
        f'--hosts={hosts}',
        f'--host={host}',
        f'--coordinator=127.0.0.1:{port}',
      )
      if hosts > 1
      else (),
      environment={'JAX_NUM_CPU_DEVICES': str(devices // hosts), **environment},
    )

  def _listens(self, syncer: Running) -> bool:
    found = re.search(r' fragments, at (\S+)$', syncer.output, re.MULTILINE)
    self._address = found[1] if found else None
    return found is not None

  @property
  def address(self) -> str:
    """The syncer's host:port."""
    return self._address

  # Watching -----------------------------------------------------------------

  def until(self, holds: Callable[[], bool], deadline_s: float, what: str):
    """Waits until `holds()`; fails with all logs where it never does."""
    until(holds, deadline_s, lambda: f'{what}\n{self.tails()}', LOOK_EVERY_S)

  def exit_code(self, running: Running, deadline_s: float = START_S) -> int:
    """Waits until the process has exited."""
    self.until(
      lambda: running.exit_code is not None, deadline_s, f'{running.name} exits'
    )
    return running.exit_code

  def spend(self, seconds: float):
    """Lets the time of a fault pass."""
    over_s = time.monotonic() + seconds
    self.until(lambda: time.monotonic() >= over_s, START_S, 'time passes')

  def steps(self, learner: int) -> list[dict]:
    """Returns what the learner wrote of each of its steps so far."""
    return self._read(self.workdir.metrics(learner_name(learner)))

  def tape(self, kind: str) -> list[dict]:
    """Returns the syncer's decisions of one kind so far."""
    lines = self._read(self.workdir.tape)
    return [line for line in lines if line['kind'] == kind]

  def _read(self, path: pathlib.Path) -> list[dict]:
    """Returns all records of a file; each is read once, however often asked."""
    if path not in self._records:
      self._records[path] = Tail(path), []
    tail, records = self._records[path]
    records += tail.new_records()
    return [*records]

  def merged(self, learner: int) -> list[dict]:
    """Returns the closed rounds that merged the learner."""
    return [
      line
      for line in self.tape('Publish')
      if any(share['learner'] == learner for share in line['shares'])
    ]

  def until_merged(self, learner: int, rounds: int = 3):
    """Waits until so many more rounds have merged the learner."""
    enough = len(self.merged(learner)) + rounds
    self.until(
      lambda: len(self.merged(learner)) >= enough,
      START_S,
      f'{rounds} more rounds merge learner {learner}',
    )

  def pids_left(self) -> list[int]:
    """Processes of the run that the launcher says are still there."""
    if not self.workdir.pids.exists():
      return []
    return list(json.loads(self.workdir.pids.read_text())['processes'].values())

  def tails(self) -> str:
    """The end of every log of the run."""
    logs = [*self._logs.glob('*.log'), *self.workdir.root.glob('logs/*.log')]
    return '\n'.join(
      f'--- {log.name}\n'
      + '\n'.join(log.read_text(errors='replace').splitlines()[-TAIL_LINES:])
      for log in sorted(logs)
    )
