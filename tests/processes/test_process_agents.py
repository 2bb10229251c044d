# SPDX-License-Identifier: Apache-2.0
"""A learner of three slices across machines, each with its agent: one is lost
with its agent and comes back, another is told to leave, and the run is trained
to its end.
"""

import itertools
import signal

import pytest

from diloco.metrics import token_ledger
from diloco.metrics.jsonl import read_jsonl
from diloco.transport.sockets import free_port
from launch.supervisor import EXIT_STOPPED
from tests.processes.processes import START_S, Processes, Running

pytestmark = [pytest.mark.beside, pytest.mark.soak]

FRAGMENTS = 2  # Of `tests_tiny`.
SLICES, ROWS, STEPS = 3, 2, 800
ALONE = (
  *('protocol.learners=1', 'data.shards=1', 'checkpoint.learner_every_steps=0'),
  *(f'mesh.slices={SLICES}', f'data.batch={SLICES * ROWS}'),
  *('run.step_floor_s=0.05', f'protocol.total_steps={STEPS}'),
)


class Run:
  """The syncer, the rendezvous, and an agent for each slice."""

  def __init__(self, processes: Processes):
    self.processes = processes
    self.syncer = processes.syncer()
    self.at = f'127.0.0.1:{free_port()}'
    self.rendezvous = processes.start(
      'rendezvous', 'launch.rendezvous', '--learner=0', f'--bind={self.at}'
    )
    self.agents = [self.agent(i) for i in range(SLICES)]

  def agent(self, slice_id: int) -> Running:
    return self.processes.start(
      f'agent-{slice_id}-{len(self.processes.running)}',
      'launch.agent',
      *('--learner=0', f'--syncer={self.processes.address}'),
      *(f'--rendezvous={self.at}', f'--slice={slice_id}'),
      environment={'JAX_NUM_CPU_DEVICES': '1', 'NPROC': '1'},
    )

  def begins(self) -> list[dict]:
    path = self.processes.workdir.learner_tape(0)
    lines = read_jsonl(path) if path.exists() else []
    return [line for line in lines if line['kind'] == 'Begin']

  def trains(self, slices: list[int], steps: int = 6) -> None:
    """Waits until so many steps of a world of so many slices are made."""

    def trains() -> bool:
      alive = [self.syncer, self.rendezvous, *self.agents]
      assert not [x.name for x in alive if x.exit_code is not None]
      begins = self.begins()
      if not begins or begins[-1]['machine']['slices'] != len(slices):
        return False
      made = [line['step'] for line in self.processes.steps(0)]
      return bool(made) and made[-1] >= begins[-1]['step'] + steps

    self.processes.until(trains, START_S, f'slices {slices} train')


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  with Processes(tmp_path_factory.mktemp('agents'), *ALONE) as processes:
    run = Run(processes)
    run.trains([0, 1, 2])
    run.agents.pop(0).end()  # Its learner's process dies with it.
    run.trains([1, 2])
    run.agents.append(run.agent(0))
    run.trains([0, 1, 2])
    leaving = run.agents.pop(0)
    leaving.send(signal.SIGTERM)
    assert processes.exit_code(leaving) == EXIT_STOPPED
    run.trains([0, 2])
    ended = [run.syncer, run.rendezvous, *run.agents]
    assert [processes.exit_code(each) for each in ended] == [0] * len(ended)
    yield run


def test_each_world_goes_on_from_the_memory_of_the_last(run):
  begins = run.begins()
  assert [x['machine']['slices'] for x in begins] == [3, 2, 3, 2]
  assert [x['source']['kind'] for x in begins] == ['seed'] + 3 * ['slice']
  made = [line['step'] for line in run.processes.steps(0)]
  # Nothing but the step that was under way is made again.
  again = [b - a for a, b in itertools.pairwise(made) if b <= a]
  assert len(again) <= 1 and min(again, default=0) >= -1
  assert made[-1] >= STEPS


def test_the_ledger_balances(run):
  workdir = run.processes.workdir
  for where, row in token_ledger.rows_of(workdir, FRAGMENTS).items():
    assert row.unexplained == 0, (where, row)
