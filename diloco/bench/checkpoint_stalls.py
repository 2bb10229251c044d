# SPDX-License-Identifier: Apache-2.0
"""Measures how long a learner's checkpoints hold its steps up.

A real train loop with AdamW on the quadratic model, without a syncer, in a
process of its own with the environment that the launcher gives. It trains first
without checkpoints, then with them; how long a step took is seen from outside.
"""

import argparse
import itertools
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np

from diloco.bench.measurement import (
  BenchFailed,
  BenchFigure,
  BenchSettings,
  duration,
  quantile,
)
from diloco.bench.real_run import MALLOC, get_config
from diloco.checkpoint.learner_records import LearnerRecords
from diloco.config import run_config
from diloco.learner import restore
from diloco.learner.device import Device
from diloco.learner.train_loop import TrainLoop
from diloco.protocol.learner import state as learner_state
from diloco.protocol.learner.machine import Learner
from diloco.run.spec import RunSpec, make_run_spec

LAYERS = 10
FRAGMENTS = 10
WARM_UP = 10  # Steps.
SAVE_S = 120.0


class NoSyncer:
  """The exchange of a learner to which nothing ever happens."""

  global_step = incarnation = process = 1
  waiting = False

  def handle(self, event):
    pass

  def next_boundary(self, wait: bool):
    pass

  def machine_state(self) -> learner_state.LearnerState:
    return self.start.snapshot()


class Nowhere:
  """Metrics and tape that keep nothing."""

  def __getattr__(self, name):
    return lambda *_: None


def run_spec_of(millions: float) -> RunSpec:
  """Returns a run of one learner with about so many million parameters."""
  width = round((millions * 1e6 / LAYERS) ** 0.5)
  config = get_config()
  config.model.update(kind='bowl', layers=LAYERS, d_model=width, d_ff=width)
  config.protocol.update(
    learners=1, quorum=1, fragments=FRAGMENTS, sync_every_steps=FRAGMENTS
  )
  config.run.log_every_steps = 1 << 30
  config.checkpoint.learner_every_steps = 1  # The benchmark says when.
  return make_run_spec(run_config.build(config))


class MeasuredLoop:
  """A train loop, and how long each of its steps takes."""

  def __init__(self, run_spec: RunSpec, folder: pathlib.Path):
    self.said: list[str] = []
    self.records = LearnerRecords(
      folder, 0, run_spec.fingerprints, 2, 0, self.said.append
    )
    self.device = Device(run_spec)
    restored = restore.restore(run_spec, self.device, self.records)
    exchange = NoSyncer()
    exchange.start = Learner(
      run_spec.config.protocol,
      run_spec.config.name,
      0,
      run_spec.fingerprints,
      restored.start,
    )
    outputs = SimpleNamespace(
      checkpoints=self.records, metrics=Nowhere(), tape=Nowhere()
    )
    self.loop = TrainLoop(
      run_spec, 0, self.device, restored, exchange, outputs, 1.0
    )
    self.loop._training = True
    rows = run_spec.config.data.batch, run_spec.config.data.seq_len + 1
    self._batch = {'tokens': np.zeros(rows, np.int32)}
    self.loop._state._batches = itertools.repeat(self._batch)

  def steps(self, count: int, every: int) -> tuple[list, list, list]:
    """Makes steps; saves every so many, but at none of them if it is 0.

    Returns:
      Seconds of each step, those of them at which a save was in progress, and
      seconds of each call that saved.
    """
    took, beside, calls = [], [], []
    save = self.loop._save_if_due

    def save_if_due():
      if not every or self.loop._step % every:
        return 0.0
      began_s = time.perf_counter()
      save()
      calls.append(time.perf_counter() - began_s)
      return 0.0

    self.loop._save_if_due = save_if_due
    for _ in range(count):
      writing = self.records._checkpoints.saving
      began_s = time.perf_counter()
      self.loop._inner_step()
      took.append(time.perf_counter() - began_s)
      if writing or self.records._checkpoints.saving:
        beside.append(took[-1])
    self.loop._save_if_due = save
    return took, beside, calls


def measure(settings: BenchSettings) -> Iterator[BenchFigure]:
  """Measures all sizes, each in a process of its own."""
  for millions in settings.sizes:
    steps, every = settings.pick((200, 50), (30, 10))
    yield from _figures(f'{millions:g} M', _in_child(millions, steps, every))


def _figures(name: str, seen: dict) -> Iterator[BenchFigure]:
  """Yields the stalls of one child."""
  off, on, beside = seen['off'], seen['on'], seen['beside']
  if seen['failed'] or not beside:
    raise BenchFailed(f'{name}: saves failed: {seen["said"]}')
  usual_s = quantile(off, 0.5)
  yield duration(
    f'{name}, longest step while saving, beyond the median',
    'ms',
    max(beside),
    max(off),
    'the longest step without saves',
    usual_s,
  )
  yield duration(
    f'{name}, p99 of steps, beyond the median',
    'ms',
    quantile(on, 0.99),
    quantile(off, 0.99),
    'p99 without saves',
    usual_s,
  )
  yield duration(
    f'{name}, longest in the call', 'ms', max(seen['calls']), usual_s, 'a step'
  )


def _in_child(millions: float, steps: int, every: int) -> dict:
  """Returns what `_trained` says, from a process of its own."""
  command = [sys.executable, '-m', 'diloco.bench.checkpoint_stalls']
  with tempfile.TemporaryDirectory() as folder:
    done = subprocess.run(
      [
        *command,
        f'--millions={millions}',
        f'--steps={steps}',
        f'--every={every}',
        f'--folder={folder}/0',
      ],
      env={**os.environ, **dict(MALLOC), 'NPROC': '2'},
      capture_output=True,
      text=True,
      check=False,
    )
  if done.returncode:
    raise BenchFailed(f'{shlex.join(command)}: {done.stderr[-500:]}')
  return json.loads(done.stdout.splitlines()[-1])


def _trained(millions: float, steps: int, every: int, folder: str) -> dict:
  """Trains without saves, then with them; returns seconds of steps."""
  measured = MeasuredLoop(run_spec_of(millions), pathlib.Path(folder))
  measured.steps(WARM_UP, 0)
  off, _, _ = measured.steps(steps, 0)
  on, beside, calls = measured.steps(steps, every)
  measured.records.wait(SAVE_S)
  return {
    'off': off,
    'on': on,
    'beside': beside,
    'calls': calls,
    'failed': measured.records.failed,
    'said': measured.said,
  }


def main(argv: Sequence[str] | None = None):
  """Makes one repetition of one size, and prints it as JSON."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--millions', type=float, default=10, help='Parameters.')
  parser.add_argument('--steps', type=int, default=200, help='Of each kind.')
  parser.add_argument('--every', type=int, default=50, help='Between saves.')
  parser.add_argument('--folder', required=True, help='Of the checkpoints.')
  args = parser.parse_args(argv)
  print(
    json.dumps(_trained(args.millions, args.steps, args.every, args.folder))
  )


if __name__ == '__main__':
  main()
