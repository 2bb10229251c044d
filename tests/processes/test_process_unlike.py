# SPDX-License-Identifier: Apache-2.0
"""Learners that are not alike: batches of 4 : 1, and another mesh.

One learner changes its batch each time that it starts, after SIGTERM and after
SIGKILL.
"""

import dataclasses
import itertools
import signal

import pytest

from diloco.metrics import token_ledger
from diloco.metrics.jsonl import read_jsonl
from diloco.protocol.incarnation import process_of
from tests.processes.processes import ENDLESS, SLOW, START_S, Processes, Running

pytestmark = pytest.mark.soak

SEQ_LEN = 32  # Of `tests_tiny`.
BATCHES = 2, 8, 2  # Of learner 1's processes; learner 0 has 8.
ROUNDS = 6  # That merge each process.


@dataclasses.dataclass
class Unlike:
  """A run that is over, and what it left."""

  processes: Processes
  fragments: int
  replay: Running

  @property
  def begins(self) -> list[dict]:
    lines = read_jsonl(self.processes.workdir.learner_tape(1))
    return [line for line in lines if line['kind'] == 'Begin']

  def end_tokens(self, begin: dict) -> int:
    """The own tokens that a process of learner 1 is known to have trained."""
    lines = read_jsonl(self.processes.workdir.learner_tape(1))
    known = [x for x in lines if x['process'] == begin['process']]
    steps = self.processes.steps(1)
    return max(
      *(line['tokens'] for line in known),
      *(
        step['train/tokens']
        for step in steps
        if process_of(int(step['incarnation'])) == begin['process']
      ),
    )


@pytest.fixture(scope='module')
def unlike(tmp_path_factory):
  root = tmp_path_factory.mktemp('unlike')
  both = 'protocol.learners=2', 'protocol.quorum=2', *ENDLESS, *SLOW
  with Processes(root, *both) as processes:
    syncer = processes.syncer()
    devices = {'JAX_NUM_CPU_DEVICES': '2'}
    mesh = 'data.batch=8', 'mesh.fsdp=2'
    first = processes.learner(0, *mesh, environment=devices)
    ends = signal.SIGTERM, signal.SIGKILL, signal.SIGTERM
    for number, (batch, end) in enumerate(zip(BATCHES, ends)):
      name = f'learner-1-{number}'
      running = processes.learner(1, f'data.batch={batch}', name=name)
      processes.until(
        lambda number=number: _merged(processes, number) >= ROUNDS,
        START_S,
        f'{name} is merged',
      )
      running.send(end)
      processes.exit_code(running)
    for running in (first, syncer):
      running.send(signal.SIGTERM)
      processes.exit_code(running)
    replay = processes.start_without_config('replay', 'diloco.replay')
    processes.exit_code(replay)
    fragments = 1 + max(x['fragment'] for x in processes.tape('Publish'))
    yield Unlike(processes, fragments, replay)


def _merged(processes: Processes, number: int) -> int:
  """Returns how many rounds have merged learner 1's process of that number."""
  merged = [
    process_of(share['incarnation'])
    for line in processes.tape('Publish')
    for share in line['shares']
    if share['learner'] == 1
  ]
  numbers = list(dict.fromkeys(merged))
  return merged.count(numbers[number]) if number < len(numbers) else 0


def test_weights_are_of_tokens_and_tokens_a_step(unlike):
  ratios = set()
  for line in unlike.processes.tape('Publish'):
    due = [x['c_tokens'] ** 2 / x['c_steps'] for x in line['shares']]
    for share, each in zip(line['shares'], due):
      assert share['weight'] == pytest.approx(each / sum(due), rel=1e-6), line
      per_step = share['c_tokens'] / share['c_steps'] / SEQ_LEN
      assert per_step == 8 or share['learner'] == 1
      ratios.add((share['learner'], per_step))
  assert ratios == {(0, 8), (1, 2), (1, 8)}


def test_a_batch_of_four_times_weighs_sixteen_times_a_step(unlike):
  seen = 0
  for line in unlike.processes.tape('Publish'):
    shares = {x['learner']: x for x in line['shares']}
    if (
      len(shares) == 2
      and shares[1]['c_tokens'] == 2 * SEQ_LEN * (shares[1]['c_steps'])
    ):
      steps = shares[0]['c_steps'] / shares[1]['c_steps']
      ratio = shares[0]['weight'] / shares[1]['weight']
      assert ratio == pytest.approx(16 * steps, rel=1e-6)
      seen += 1
  assert seen >= ROUNDS


def test_no_row_is_skipped_and_only_lost_ones_are_trained_twice(unlike):
  begins = unlike.begins
  assert len(begins) == len(BATCHES) and begins[0]['rows'] == 0
  twice = 0
  for begin, following in itertools.pairwise(begins):
    made = unlike.end_tokens(begin) - begin['tokens']
    again = begin['rows'] + made // SEQ_LEN - following['rows']
    assert again >= 0, f'{-again} rows are skipped: {following}'
    twice += again
  stopped = unlike.begins[1]
  made = unlike.end_tokens(begins[0]) // SEQ_LEN
  assert stopped['rows'] == made, 'after SIGTERM there is nothing to repeat'
  rows = token_ledger.rows_of(unlike.processes.workdir, unlike.fragments)
  for p in range(unlike.fragments):
    lost = dict(rows[1, p].lost).get(token_ledger.DIED, 0)
    assert twice * SEQ_LEN <= lost


def test_the_ledger_balances_to_the_token(unlike):
  rows = token_ledger.rows_of(unlike.processes.workdir, unlike.fragments)
  assert {(m, p) for m, p in rows} == {
    (m, p) for m in (0, 1) for p in range(unlike.fragments)
  }
  for where, row in rows.items():
    assert row.unexplained == 0, (where, row)
    assert row.merged > 0


def test_it_takes_the_moments_of_one_that_is_unlike(unlike):
  """After SIGKILL: those of a learner with another mesh and batch."""
  source = unlike.begins[2]['source']
  assert (source['kind'], source['learner']) == ('peer', 0)


def test_the_replay_makes_the_same_bytes(unlike):
  assert unlike.replay.exit_code == 0, unlike.replay.output
  assert 'every round has the CRC of the run' in unlike.replay.output
  assert 'bytes may differ' not in unlike.replay.output
