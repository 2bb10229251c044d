# SPDX-License-Identifier: Apache-2.0
"""Measures how long a learner's checkpoints hold its steps up.

    python -m tests.benchmarks.saving --millions=10

A real train loop with AdamW on the quadratic model, without a syncer, in a
process of its own with the environment that the launcher gives. Each process
trains first without checkpoints, then with them, and the rows say how long a
step took from outside. `at` is the longest step from a save's own to the end of
its writing, less the median step; `call` the longest that the loop was in the
call that saves.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from diloco.checkpoint.learner_records import LearnerRecords
from diloco.config import run_config
from diloco.learner import restore
from diloco.learner.device import Device
from diloco.learner.train_loop import TrainLoop
from diloco.protocol.learner import state as learner_state
from diloco.protocol.learner.machine import Learner
from diloco.run.spec import RunSpec, make_run_spec
from experiments import tests_tiny
from launch.program import MALLOC

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
  config = tests_tiny.get_config()
  config.model.update(kind='bowl', layers=LAYERS, d_model=width, d_ff=width)
  config.protocol.update(
    learners=1, quorum=1, fragments=FRAGMENTS, sync_every_steps=FRAGMENTS
  )
  config.run.log_every_steps = 1 << 30
  config.checkpoint.learner_every_steps = 1  # The benchmark says when.
  return make_run_spec(run_config.build(config))


class Measured:
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
      self.loop._inner_step(self._batch)
      took.append(time.perf_counter() - began_s)
      if writing or self.records._checkpoints.saving:
        beside.append(took[-1])
    self.loop._save_if_due = save
    return took, beside, calls


def measure(millions: float, steps: int, every: int, folder: str):
  """Prints the rows of one process."""
  measured = Measured(run_spec_of(millions), pathlib.Path(folder))
  measured.steps(WARM_UP, 0)
  for name, each in (('off', 0), ('on', every)):
    took, beside, calls = measured.steps(steps, each)
    print(_row(name, took, beside, calls), flush=True)
    measured.records.wait(SAVE_S)
  print(f'       {len(calls)} saves, {measured.records.failed} failed')
  for line in measured.said:
    print(f'       {line}')


def _row(name, took, beside, calls) -> str:
  p50, p99, longest = (1e3 * np.quantile(took, q) for q in (0.5, 0.99, 1.0))
  at = 1e3 * max(beside, default=0.0) - p50 if beside else 0.0
  call = 1e3 * max(calls, default=0.0)
  values = p50, p99, longest, at, call
  return f'{name:5}' + ''.join(f'  {value:7.1f}' for value in values)


def main(argv: Sequence[str] | None = None):
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--millions', type=float, default=10, help='Parameters.')
  parser.add_argument('--steps', type=int, default=200, help='Of each row.')
  parser.add_argument('--every', type=int, default=50, help='Between saves.')
  parser.add_argument('--repeats', type=int, default=3, help='Processes.')
  parser.add_argument('--folder', default='', help=argparse.SUPPRESS)
  args = parser.parse_args(argv)
  if args.folder:
    measure(args.millions, args.steps, args.every, args.folder)
    return
  print('saves  p50 ms   p99 ms   max ms       at     call', flush=True)
  command = [sys.executable, '-m', 'tests.benchmarks.saving']
  command += [f'--{key}={getattr(args, key)}' for key in ('millions', 'steps')]
  for _ in range(args.repeats):
    with tempfile.TemporaryDirectory() as folder:
      subprocess.run(
        [*command, f'--every={args.every}', f'--folder={folder}/0'],
        env={**os.environ, **dict(MALLOC), 'NPROC': '2'},
        check=True,
      )


if __name__ == '__main__':
  main()
