# SPDX-License-Identifier: Apache-2.0
"""A learner of two hosts (batch 8) beside one of one host (mesh, batch 2).

The second is killed and takes the first's state; then a host of the first is
killed, and all of it takes the second's.
"""

import signal
import zlib

import numpy as np
import pytest

from diloco.metrics import token_ledger
from diloco.metrics.jsonl import read_jsonl
from tests.learner.groups import Group
from tests.processes.processes import ENDLESS, SLOW, START_S, Processes

pytestmark = pytest.mark.beside

FRAGMENTS = 2  # Of `tests_tiny`.
TWO = ('data.batch=8', 'mesh.fsdp=2')
ONE = ('data.batch=2', 'mesh.tensor=2')


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  root = tmp_path_factory.mktemp('hosts')
  (root / 'noted').mkdir()
  noted = {'NOTED': str(root / 'noted')}
  heads = 'model.heads=4', 'model.kv_heads=4', 'model.head_dim=8'
  with Processes(root, 'protocol.learners=2', *heads, *ENDLESS, *SLOW) as run:
    run.module = 'tests.processes.noted_learner'
    syncer = run.syncer()
    two = Group(run, 0, 2, 2, noted, TWO)
    one = Group(run, 1, 1, 2, noted, ONE)
    _until_begun(run, (1, 1))
    run.until_merged(1)  # Before the first close it would draw the seed again.
    one.members[0].send(signal.SIGKILL)
    one.exit_codes()
    one = Group(run, 1, 1, 2, noted, ONE)
    _until_begun(run, (1, 2))
    two.members[1].send(signal.SIGKILL)
    two.exit_codes()
    two = Group(run, 0, 2, 2, noted, TWO)
    _until_begun(run, (2, 2))
    for running in (two.members[0], *one.members, syncer):
      running.send(signal.SIGTERM)
      run.exit_code(running)
    yield run


def _begins(run: Processes, learner: int) -> list[dict]:
  lines = read_jsonl(run.workdir.learner_tape(learner))
  return [line for line in lines if line['kind'] == 'Begin']


def _until_begun(run: Processes, counts: tuple[int, int]):
  """Waits until so many processes of each learner have begun, and train."""

  def train() -> bool:
    return all(
      len(begins := _begins(run, m)) >= count
      and any(x['step'] > begins[-1]['step'] for x in run.steps(m)[-1:])
      for m, count in enumerate(counts)
    )

  run.until(train, START_S, f'{counts} processes train')


def _noted(run: Processes, what: str, hosts: int) -> dict[str, np.ndarray]:
  """Puts together what all hosts noted of a state, by tensor."""
  found: dict[str, np.ndarray] = {}
  for host in range(hosts):
    path = run.workdir.root.parent / 'noted' / f'{what}-{host}-0.npz'
    with np.load(path) as boxes:
      for key, values in boxes.items():
        name, _, box = key.rpartition('@')
        ends = [tuple(map(int, x.split(':'))) for x in box.split(',') if x]
        shape = [max(end, n) for (_, end), n in zip(ends, values.shape)]
        whole = found.get(name, np.empty([0] * values.ndim, values.dtype))
        grown = np.zeros(
          [max(a, b) for a, b in zip(shape, whole.shape)], values.dtype
        )
        grown[tuple(map(slice, whole.shape))] = whole
        grown[tuple(slice(*each) for each in ends)] = values
        found[name] = grown
  return found


@pytest.mark.parametrize(
  ('learner', 'given', 'taken'),
  [(1, 2, 1), (0, 1, 2)],
  ids=['2 to 1', '1 to 2'],
)
def test_the_state_is_the_donors_to_the_bit(run, learner, given, taken):
  """θ and both moments, by the CRC of each whole tensor."""
  gave, took = (
    {name: zlib.crc32(x.tobytes()) for name, x in noted.items()}
    for noted in (
      _noted(run, f'gave-{learner}', given),
      _noted(run, f'took-{learner}', taken),
    )
  )
  assert gave == took
  moments = [name for name in gave if '/mu/' in name or '/nu/' in name]
  zeros = {
    name
    for name, x in _noted(run, f'took-{learner}', taken).items()
    if not x.any()
  }
  assert moments and not zeros & {*moments}, 'a fresh state'


def test_the_tape_says_of_whom_it_is_and_rows_go_on(run):
  for learner, donor in ((1, 0), (0, 1)):
    first, again = _begins(run, learner)
    source = again['source']
    assert (source['kind'], source['learner']) == ('peer', donor)
    assert again['rows'] > first['rows'] == 0
    assert again['rows'] % again['machine']['batch'] == 0
  assert [_begins(run, m)[1]['machine']['hosts'] for m in (0, 1)] == [2, 1]


def test_the_ledger_balances(run):
  rows = token_ledger.rows_of(run.workdir, FRAGMENTS)
  assert len(rows) == 2 * FRAGMENTS
  for where, row in rows.items():
    assert row.unexplained == 0, (where, row)
