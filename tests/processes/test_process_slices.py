# SPDX-License-Identifier: Apache-2.0
"""A learner of three slices loses two of them, one after the other, slice 0
among them, and takes them back: alone, without checkpoints.
"""

import contextlib
import itertools
import json
import os
import pathlib
import signal
import sys

import pytest

from diloco.metrics import token_ledger
from diloco.metrics.jsonl import read_jsonl
from launch.program import Role
from launch.supervisor import ProcessEvent, Supervisor
from tests.processes.processes import ENDLESS, REPOSITORY, START_S, Processes

pytestmark = pytest.mark.beside

FRAGMENTS = 2  # Of `tests_tiny`.
LENGTH = 32  # Tokens of a row, likewise.
SLICES, ROWS = 3, 2  # Rows of a slice.
ALONE = (
  *('protocol.learners=1', 'data.shards=1', 'checkpoint.learner_every_steps=0'),
  *(f'mesh.slices={SLICES}', f'data.batch={SLICES * ROWS}'),
  'run.step_floor_s=0.02',
)
# Five worlds compile their own programs, which would take half of the time.
FAST_COMPILES = '--xla_backend_optimization_level=0'
AWAY_S = 1e6  # Until the test has them taken back.


class Run:
  """The syncer, and a learner under the launcher's supervisor."""

  def __init__(self, processes: Processes, noted: pathlib.Path):
    self.processes, self.noted = processes, noted
    self.events: list[ProcessEvent] = []
    overrides = (f'--config.{x}' for x in (*ALONE, *ENDLESS))
    argv = (
      *(sys.executable, '-m', 'tests.processes.noted_slices', '--learner=0'),
      *('--config=experiments/tests_tiny.py', *overrides),
      *(f'--workdir={processes.workdir.root}', f'--syncer={processes.address}'),
    )
    environment = {
      'NOTED': str(noted),
      'JAX_NUM_CPU_DEVICES': '1',
      'XLA_FLAGS': FAST_COMPILES,
    }
    role = Role(
      'learner-0', argv, hosts=SLICES, slices=SLICES, leave_s=30.0,
      environment=tuple(environment.items()),
    )  # fmt: skip
    logs = processes.workdir.root / 'logs'
    self.supervisor = Supervisor(
      [role],
      lambda name: logs / f'{name}.log',
      processes.environment | {'PYTHONPATH': str(REPOSITORY), 'NPROC': '1'},
      restarts_max=0,
      restart_delay_s=AWAY_S,
      announce=self.events.append,
    )

  def until(self, holds, what: str):
    def polled() -> bool:
      self.supervisor.poll()
      assert not self.supervisor.failure, self.supervisor.failure
      return holds()

    self.processes.until(polled, START_S, what)

  def boundaries(self, slice_id: int) -> list[dict]:
    path = self.noted / f'slice-{slice_id}.host-0.jsonl'
    if not path.exists():
      return []
    lines = path.read_text().split('\n')[:-1]  # The last is being written.
    return [json.loads(line) for line in lines]

  def trains(self, slices: list[int], steps: int = 6):
    """Waits until a world of just these slices has made so many steps."""

    def trains() -> bool:
      if self.supervisor.slices('learner-0') != slices:
        return False
      last = [self.boundaries(i)[-steps:] for i in slices]
      size = ROWS * len(slices)
      return all(
        len(x) == steps
        and len({y['process'] for y in x}) == 1
        and {y['batch'] for y in x} == {size}
        and x[-1]['process'] in self.pids()
        for x in last
      )

    self.until(trains, f'slices {slices} train')

  def pids(self) -> set[int]:
    started = {e.pid for e in self.events if e.event == 'started'}
    return started - {e.pid for e in self.events if e.event == 'exited'}

  def send(self, slice_id: int, number: signal.Signals):
    os.kill(self.boundaries(slice_id)[-1]['process'], number)


@contextlib.contextmanager
def training(root: pathlib.Path):
  """Makes a context in which the run trains with all slices."""
  noted = root / 'noted'
  noted.mkdir()
  with Processes(root, *ALONE, *ENDLESS) as processes:
    syncer = processes.syncer()
    run = Run(processes, noted)
    with run.supervisor:
      run.trains([0, 1, 2])
      yield run
    syncer.send(signal.SIGTERM)
    processes.exit_code(syncer)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  with training(tmp_path_factory.mktemp('slices')) as run:
    for lost, left in ((1, [0, 2]), (0, [1, 2])):
      run.send(lost, signal.SIGKILL)
      run.trains(left)
      run.supervisor.take_back('learner-0')
      run.trains([0, 1, 2])
  return run


def _worlds(run: Run) -> list[dict[int, list[dict]]]:
  """Returns the boundaries of each world, by slice, in order."""
  begins = [
    x
    for x in read_jsonl(run.processes.workdir.learner_tape(0))
    if x['kind'] == 'Begin'
  ]
  of_process = {}
  for i in range(SLICES):
    for line in run.boundaries(i):
      of_process.setdefault(line['process'], (i, []))[1].append(line)
  worlds: list[dict[int, list[dict]]] = []
  for i, lines in of_process.values():
    firsts = [w for w in worlds if i not in w and _same_start(w, lines)]
    if firsts:
      firsts[0][i] = lines
    else:
      worlds.append({i: lines})
  worlds.sort(key=lambda w: next(iter(w.values()))[0]['step'])
  assert len(worlds) == len(begins)
  return worlds


def _same_start(world: dict[int, list[dict]], lines: list[dict]) -> bool:
  first = next(iter(world.values()))[0]
  return [first[k] for k in ('step', 'batch')] == [
    lines[0][k] for k in ('step', 'batch')
  ]


def test_each_world_goes_on_from_a_boundary_of_the_last(run):
  """θ, both moments, step and rows; of the slices that come back, too."""
  worlds = _worlds(run)
  assert [sorted(world) for world in worlds] == [
    [0, 1, 2],
    [0, 2],
    [0, 1, 2],
    [1, 2],
    [0, 1, 2],
  ]
  for before, after in itertools.pairwise(worlds):
    firsts = [lines[0] for lines in after.values()]
    step = firsts[0]['step']
    # Of the first world all lines, of the others what came out of memory, too.
    old = {line['step']: line for lines in before.values() for line in lines}
    # Nothing but the step that was under way is lost.
    assert max(old) - 1 <= step <= max(old)
    moments = [name for name in firsts[0]['crcs'] if '/mu/' in name]
    assert moments
    for first in firsts:
      for key in ('step', 'rows', 'crcs'):
        assert first[key] == old[step][key], key


def test_no_row_is_trained_twice_and_the_ledger_balances(run):
  worlds = _worlds(run)
  rows = []
  for world, after in zip(worlds, [*worlds[1:], None]):
    lines = max(world.values(), key=len)
    until = after and next(iter(after.values()))[0]['step']
    steps = {line['step']: line for line in lines}
    for line in steps.values():
      if until is None or line['step'] < until:
        rows += range(line['rows'], line['rows'] + line['batch'])
  # Exactly the rows are missing that the tape names as lost.
  reformed = [
    x for x in read_jsonl(run.processes.workdir.tape) if x['kind'] == 'Reform'
  ]
  sizes = [(x['slices_before'], x['slices']) for x in reformed]
  assert sizes == [(3, 2), (2, 3), (3, 2), (2, 3)]
  missing = {*range(max(rows) + 1)} - {*rows}
  assert len({*rows}) == len(rows)
  lost = sum(x['lost_tokens'] for x in reformed)
  assert lost == len(missing) * LENGTH
  for where, row in token_ledger.rows_of(
    run.processes.workdir, FRAGMENTS
  ).items():
    assert row.unexplained == 0, (where, row)
    assert dict(row.lost)[token_ledger.SLICE] > 0, row


@pytest.mark.soak
def test_a_host_that_hangs_is_ended_and_the_others_go_on(tmp_path):
  with training(tmp_path) as run:
    run.send(2, signal.SIGSTOP)
    run.trains([0, 1])
