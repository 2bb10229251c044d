# SPDX-License-Identifier: Apache-2.0
"""A run of processes that is killed in many ways: what its tests share."""

import dataclasses
import pathlib
import signal

import numpy as np

from diloco.checkpoint import store as checkpoint_store
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import learner_name
from tests.processes.processes import START_S, Processes, Running

SAVE_STEPS = 40
# Compiled in no time: nearly half of what a learner takes to start.
BOWL = ('model.kind=bowl', 'model.layers=2', 'model.d_ff=128')
NOTICE_S = 20.0


@dataclasses.dataclass
class Survived:
  """A run that has survived, and what it looked like at each death.

  Attributes:
    processes: all of them; what they wrote is complete.
    steps: of learner 1, when it was killed alone.
    started: lines of the syncer's event log before each of its later starts.
    notice: lines of the syncer's event log when learner 1 got its SIGTERM.
    stopped_step: that learner 1 had written by then.
    took_s: from that to its exit.
    codes: exit codes, by what was ended.
    replay: of all that, done.
    diverged_code: exit code of the learner whose moments were spoilt.
    asked: lines of the syncer's event log before a donor was asked that died.
  """

  processes: Processes
  steps: int = 0
  started: dict[str, int] = dataclasses.field(default_factory=dict)
  notice: int = 0
  stopped_step: int = 0
  took_s: float = 0.0
  codes: dict[str, int] = dataclasses.field(default_factory=dict)
  replay: Running | None = None
  diverged_code: int | None = None
  asked: int = 0

  @property
  def tape(self) -> list[dict]:
    return read_jsonl(self.processes.workdir.tape)

  def after(self, phase: str) -> list[dict]:
    """The syncer's event log from a phase's start to the next one's."""
    bounds = [*self.started.values(), len(self.tape)]
    begin = self.started[phase]
    return self.tape[begin : min(b for b in bounds if b > begin)]

  def begins(self, learner: int) -> list[dict]:
    path = self.processes.workdir.learner_tape(learner)
    return [line for line in read_jsonl(path) if line['kind'] == 'Begin']

  def log(self, name: str) -> str:
    """The output of a process so far."""
    running = self.processes.running
    return next(each.output for each in running if each.name == name)

  def crcs_at(self, started: dict) -> list[int]:
    """Returns the started versions, as the log had them at their closes."""
    crcs = {
      (line['fragment'], line['version']): line['crc']
      for line in self.tape
      if line['kind'] == 'Publish'
    }
    return [crcs[p, v] for p, v in enumerate(started['versions'])]


def spoil(folder: pathlib.Path):
  """A newer checkpoint, whole and sound, whose moments are not numbers."""
  store = checkpoint_store.Checkpoints(folder, 2, print)
  newest = checkpoint_store.newest_after(folder, -1)
  arrays = {
    name: array * np.float32(np.nan)
    if name.startswith('optimizer/') and array.dtype == np.float32
    else array
    for name, array in newest.arrays.items()
  }
  assert store.save(store.newest_step + 1, arrays, newest.meta)
  store.close(START_S)
  assert store.failed == 0


def until_both_merged(processes: Processes):
  for m in (0, 1):
    processes.until_merged(m)


def start_all(processes: Processes, phase: str):
  syncer = processes.syncer(name=f'syncer-{phase}')
  learners = [
    processes.learner(
      m, name=f'{learner_name(m)}-{phase}', flags=(f'--notice_s={NOTICE_S}',)
    )
    for m in (0, 1)
  ]
  return syncer, learners


def stop_all(run: Survived, name: str, running: list[Running]):
  for each in running:
    each.send(signal.SIGTERM)
  for each in running:
    run.codes[f'{name} {each.name}'] = run.processes.exit_code(each)


def unsaved(processes: Processes, learner: int) -> int:
  """Steps since its last turn to save."""
  turn = learner * SAVE_STEPS // 2
  return (processes.steps(learner)[-1]['step'] - turn) % SAVE_STEPS
