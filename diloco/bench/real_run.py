# SPDX-License-Identifier: Apache-2.0
"""Runs of real processes for the benchmarks: started, watched, always ended.

This file is also their configuration, which each process is started with.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping

import ml_collections

from diloco.bench.measurement import BenchFailed
from diloco.config import run_config
from diloco.metrics import names
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import Workdir, learner_name
from diloco.transport.sockets import free_port

ENDLESS = 10**8  # Steps; the benchmark ends the run.
NEVER = 4 * 10**7  # H, such that no round becomes due.
SYNCER, LAUNCHER = 'syncer', 'launcher'
LOOK_EVERY_S = 0.05
DEADLINE_S = 600.0  # For what takes seconds on a quiet machine.
BOWL_LAYERS = 10
TAIL = 600  # Characters of a log that a failure shows.


def get_config() -> ml_collections.ConfigDict:
  """Returns the smallest run of two learners; rows change what they need."""
  config = ml_collections.ConfigDict(run_config.defaults())
  config.name = 'bench'
  config.model.update(
    layers=1, d_model=32, heads=2, kv_heads=1, head_dim=16, d_ff=32
  )
  config.data.update(
    source='grammar', seq_len=32, batch=4, grammar_bytes=1 << 16
  )
  config.inner.update(warmup_steps=4)
  config.protocol.update(total_steps=ENDLESS)
  # A learner saves nothing, and the syncer its ledger alone.
  config.checkpoint.update(learner_every_steps=0, syncer_every_rounds=10**6)
  config.run.update(log_every_steps=1, cpu_threads=2)
  return config


def bowl(millions: float) -> dict[str, object]:
  """Returns the model of so many million parameters whose steps are cheap."""
  width = max(1, round((millions * 1e6 / BOWL_LAYERS) ** 0.5))
  return {
    'model.kind': 'bowl',
    'model.layers': BOWL_LAYERS,
    'model.d_model': width,
    'model.d_ff': width,
  }


class RealRun:
  """A syncer and learners as processes; the `with` block kills what it started.

  Args:
    overrides: dotted key -> value, in place of those of `get_config`.
  """

  def __init__(self, overrides: Mapping[str, object]):
    self._overrides = dict(overrides)
    self._address = '127.0.0.1:0'
    self.processes: dict[str, subprocess.Popen] = {}

  def __enter__(self) -> 'RealRun':
    self._folder = pathlib.Path(tempfile.mkdtemp(prefix='bench-'))
    self.workdir = Workdir(self._folder / 'run')
    self.workdir.root.mkdir()
    compiled = self.workdir.compiled
    self._environment = {
      'JAX_PLATFORMS': 'cpu',  # Two learners can't share an accelerator.
      **os.environ,
      'NPROC': '2',
      'PYTHONUNBUFFERED': '1',
      'JAX_COMPILATION_CACHE_DIR': str(compiled.absolute()),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    }
    return self

  def __exit__(self, *exception):
    for name in list(self.processes):
      self.kill(name)
    shutil.rmtree(self._folder, ignore_errors=True)

  # Starting and ending ------------------------------------------------------

  def start_syncer(self):
    """Starts the syncer, and waits until it listens."""
    self._start(SYNCER, 'diloco.syncer', f'--bind={self._address}')
    log, addresses = self._log(SYNCER), []

    def listens() -> bool:
      text = log.read_text(errors='replace')
      addresses[:] = re.findall(r' fragments, at (\S+)$', text, re.MULTILINE)
      return bool(addresses)

    self.until(listens, 'the syncer listens')
    self._address = addresses[-1]

  def start_learner(self, learner: int, hosts: int = 1, **own: object):
    """Starts a learner, one process for each host, each with one device.

    Args:
      own: keys of the section `run`.
    """
    coordinator = f'127.0.0.1:{free_port()}'
    for host in range(hosts):
      self._start(
        learner_name(learner, host),
        'diloco.learner',
        f'--learner={learner}',
        f'--syncer={self._address}',
        *(f'--config.run.{key}={value}' for key, value in own.items()),
        *(
          (f'--hosts={hosts}', f'--host={host}', f'--coordinator={coordinator}')
          if hosts > 1
          else ()
        ),
      )

  def start_launcher(self, *flags: str):
    """Starts `diloco local`, which starts all others and ends with them."""
    self._start(LAUNCHER, 'launch.local', '--cpu_devices', *flags)

  def kill_of_launcher(self, name: str) -> float:
    """Kills the newest process of the launcher's that has a name; returns when.

    Args:
      name: as `events.jsonl` has it, such as 'learner-0.1'.
    """
    pid = [
      event['pid']
      for event in read_jsonl(self.workdir.events)
      if event['process'] == name and event['event'] == 'started'
    ][-1]
    at_s = time.time()
    os.kill(pid, signal.SIGKILL)
    return at_s

  def kill(self, name: str):
    """Kills a process, which may be started again."""
    process = self.processes.pop(name)
    process.kill()
    process.wait()

  def _start(self, name: str, module: str, *flags: str):
    command = [
      *(sys.executable, '-m', module),
      f'--config={pathlib.Path(__file__)}',
      f'--workdir={self.workdir.root}',
      *(f'--config.{key}={value}' for key, value in self._overrides.items()),
      *flags,
    ]
    with self._log(name).open('wb') as log:
      self.processes[name] = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=self._environment,
      )

  def _log(self, name: str) -> pathlib.Path:
    return self._folder / f'{name}.log'

  # Watching -----------------------------------------------------------------

  def until(self, holds: Callable[[], bool], what: str):
    """Waits until `holds()`.

    Raises:
      BenchFailed: it did not in time, or a process has ended.
    """
    over_s = time.monotonic() + DEADLINE_S
    while not holds():
      for name, process in self.processes.items():
        if process.poll() is not None:
          tail = self._log(name).read_text(errors='replace')[-TAIL:]
          raise BenchFailed(
            f'{name} exits with {process.returncode} before {what}: {tail}'
          )
      if time.monotonic() > over_s:
        raise BenchFailed(f'not within {DEADLINE_S:.0f} s: {what}')
      time.sleep(LOOK_EVERY_S)

  def peak_bytes(self, name: str) -> int:
    """Returns the most that a process had in memory so far."""
    return 1024 * status(self.processes[name].pid, 'VmHWM')

  def steps(self, learner: int) -> list[dict]:
    """Returns what the learner wrote of each of its steps so far."""
    return read_jsonl(self.workdir.metrics(learner_name(learner)))

  def reformings(self) -> list[dict]:
    """Returns when learners went on with other slices, so far."""
    lines = read_jsonl(self.workdir.tape)
    return [line for line in lines if line['kind'] == 'Reform']

  def closes(self, learner: int | None = None) -> list[dict]:
    """Returns the rounds that closed so far, if given those with a learner."""
    return [
      line
      for line in read_jsonl(self.workdir.tape)
      if line['kind'] == 'Publish'
      and (
        learner is None
        or any(share['learner'] == learner for share in line['shares'])
      )
    ]

  def until_steps(self, learner: int, more: int) -> list[dict]:
    """Waits for so many more steps of a learner, and returns them."""
    before = len(self.steps(learner))
    self.until(
      lambda: len(self.steps(learner)) >= before + more,
      f'{more} more steps of learner {learner}',
    )
    return self.steps(learner)[before : before + more]

  def until_merged(self, learner: int, more: int):
    """Waits until so many rounds have merged the learner."""
    self.until(
      lambda: len(self.closes(learner)) >= more,
      f'{more} rounds merge learner {learner}',
    )


def column(records: list[dict], name: str) -> list[float]:
  """Returns one scalar of all records that have it."""
  return [record[name] for record in records if name in record]


def step_seconds(records: list[dict]) -> list[float]:
  """Returns how long each step took."""
  return column(records, names.STEP_TIME)


def status(pid: int, field: str) -> int:
  """Returns a number of /proc/PID/status, in its unit."""
  try:
    text = pathlib.Path(f'/proc/{pid}/status').read_text()
  except OSError as error:
    raise BenchFailed(f'{error.filename}: {error.strerror}') from None
  return int(re.search(rf'^{field}:\s+(\d+)', text, re.MULTILINE)[1])
