# SPDX-License-Identifier: Apache-2.0
"""The syncer's disk may be full, be broken, or be another's."""

import dataclasses
import itertools
import resource
import shutil

import numpy as np
import pytest

from diloco.checkpoint.parameters import read_parameters
from diloco.metrics import names
from diloco.metrics.jsonl import read_jsonl
from tests.processes.processes import (
  ENDLESS,
  EXIT_CONFIG,
  SLOW,
  START_S,
  Processes,
  Running,
)
from tests.survival.survival import BOWL

pytestmark = pytest.mark.beside

FULL_S = 4.0
STEPS = 40


# The end of a run ------------------------------------------------------------


@dataclasses.dataclass
class Ended:
  """A run whose syncer was killed before its results were all there.

  Attributes:
    processes: of the run; its learners are done.
    expected: the final parameters, as they would have been.
    codes: exit codes of the syncer that regained a damaged checkpoint, and of
      the learners that were still there.
    regained: the final parameters, as that one wrote them.
    said: its log.
  """

  processes: Processes
  expected: dict[str, np.ndarray]
  codes: list[int]
  regained: dict[str, np.ndarray]
  said: str

  def syncer_of(self, name: str, *flags: str) -> Running:
    """Starts one on the disk as the killed one left it, without results.

    `change` what it finds before, in `workdir`.
    """
    return self.processes.start(
      name, 'diloco.syncer', '--bind=127.0.0.1:0', *flags
    )

  def as_it_was(self):
    """The disk as the killed syncer left it; returns the run's folder."""
    workdir = self.processes.workdir
    for path in (workdir.syncer, workdir.parameters):
      shutil.rmtree(path, ignore_errors=True)
    workdir.summary.unlink(missing_ok=True)
    shutil.copytree(workdir.root.parent / 'left', workdir.syncer)
    return workdir


@pytest.fixture(scope='module')
def ended(tmp_path_factory):
  root = tmp_path_factory.mktemp('ended')
  with Processes(root, *BOWL, f'protocol.total_steps={STEPS}') as processes:
    workdir = processes.workdir
    in_the_way = workdir.status / 'in the way'
    in_the_way.mkdir(parents=True)
    syncer = processes.syncer()
    learners = [processes.learner(m) for m in (0, 1)]
    processes.until(
      lambda: 'the result waits for the disk' in syncer.output,
      START_S,
      'the run has ended',
    )
    processes.spend(2.0)  # A learner fetches the last update.
    syncer.end()
    shutil.rmtree(workdir.status)
    expected = read_parameters(workdir.parameters)
    shutil.rmtree(workdir.parameters)
    shutil.copytree(workdir.syncer, root / 'left')
    _damage(workdir)
    again = processes.syncer(name='syncer-regains')
    codes = [processes.exit_code(each) for each in (again, *learners)]
    regained = read_parameters(workdir.parameters)
    yield Ended(processes, expected, codes, regained, again.output)


def _damage(workdir):
  """Every checkpoint of the syncer, in the middle of its arrays."""
  found = [
    path
    for path in (workdir.syncer / 'states').rglob('*')
    if path.is_file() and path.stat().st_size > 10_000
  ]
  assert found
  for path in found:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _check_same(found, expected):
  assert found.keys() == expected.keys()
  for name, array in expected.items():
    np.testing.assert_array_equal(found[name], array, name)


def test_a_damaged_last_checkpoint_is_regained_from_learners(ended):
  assert ended.codes == [0, 0, 0]
  assert 'is passed over' in ended.said
  _check_same(ended.regained, ended.expected)


def test_what_nobody_has_is_refused_and_nothing_written(ended):
  workdir = ended.as_it_was()
  _damage(workdir)
  syncer = ended.syncer_of('refuses', '--config.transport.connect_s=2')
  assert ended.processes.exit_code(syncer) == 1
  [error] = syncer.errors
  assert 'of the final parameters: no process has it' in error
  assert not workdir.parameters.exists()
  assert not workdir.summary.exists()


def test_a_broken_ledger_tape_and_status_keep_no_run_from_going_on(ended):
  workdir = ended.as_it_was()
  ledger = workdir.syncer / 'ledger.json'
  text = ledger.read_text()
  ledger.write_text(text.replace('"step": ', '"step": 1', 1))
  with workdir.tape.open('ab') as file:
    file.write(b'\x00 not a line\n{"kind": "Publish"')
  workdir.status.write_text('')
  syncer = ended.syncer_of('broken')
  assert ended.processes.exit_code(syncer) == 0
  assert 'is passed over, as ledger.json.broken' in syncer.output
  assert 'a line is passed over' in syncer.output
  _check_same(read_parameters(workdir.parameters), ended.expected)


# A run that goes on ----------------------------------------------------------


@pytest.fixture(scope='module')
def filled(tmp_path_factory):
  """A syncer and a learner that no file can grow of for `FULL_S`, and when."""
  root = tmp_path_factory.mktemp('filled')
  with Processes(root, *BOWL, *SLOW, *ENDLESS) as processes:
    syncer, learner = processes.syncer(), processes.learner(0)
    processes.until_merged(0)
    before = processes.steps(0)[-1]
    for each in (syncer, learner):
      _limit(each, 0)
    processes.spend(FULL_S)
    for each in (syncer, learner):
      _limit(each, resource.RLIM_INFINITY)
    if syncer.exit_code is None and learner.exit_code is None:
      processes.until_merged(0)
    yield processes, syncer, learner, before[names.TIME]


def _limit(running: Running, nbytes: int):
  """Limits how large a file of the process may grow."""
  hard = resource.prlimit(running.pid, resource.RLIMIT_FSIZE)[1]
  resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (nbytes, hard))


def test_a_full_disk_ends_no_process(filled):
  _, syncer, learner, _ = filled
  assert syncer.exit_code is None
  assert learner.exit_code is None


def test_learners_train_on_while_rounds_wait_for_the_disk(filled):
  processes, syncer, _, since_s = filled
  steps = processes.steps(0)
  counts = [step['step'] for step in steps]
  assert counts == list(range(1, len(counts) + 1))  # They waited, all of them.
  closes_s = [line['time_s'] for line in processes.tape('Publish')]
  waited_s, from_s = max(
    (later - earlier, earlier)
    for earlier, later in itertools.pairwise(closes_s)
  )
  assert waited_s > FULL_S / 2
  assert since_s < from_s + waited_s, 'it waited for something else'
  middle = [
    x for x in steps if 0.25 < (x[names.TIME] - from_s) / waited_s < 0.75
  ]
  assert len(middle) >= 2, 'of about 50'
  assert 'is in the ledger' in syncer.output


def test_no_round_is_told_twice_or_left_out(filled):
  processes, _, _, _ = filled
  rounds = [line['round'] for line in processes.tape('Publish')]
  assert rounds == list(range(1, len(rounds) + 1))


def test_a_second_syncer_is_refused_by_the_first_one_s_number(filled):
  processes, syncer, _, _ = filled
  second = processes.start('second', 'diloco.syncer', '--bind=127.0.0.1:0')
  assert processes.exit_code(second) == EXIT_CONFIG
  [error] = second.errors
  assert f'is in use by process {syncer.pid} of ' in error
  processes.until_merged(0)


@pytest.mark.soak
def test_a_syncer_that_starts_on_a_full_disk_waits_for_it(filled):
  """The syncer lets learners in, and closes no round before there is room."""
  processes, syncer, learner, _ = filled
  processes.until_merged(0)
  last = processes.steps(0)[-1]
  syncer.end()
  again = processes.syncer_again('syncer-on-a-full-disk')
  _limit(again, 0)

  def joined_or_ended() -> bool:
    now = processes.steps(0)[-1]
    return (
      again.exit_code is not None
      or now[names.INCARNATION] > last[names.INCARNATION]
    )

  processes.until(joined_or_ended, START_S, 'the learner has joined it')
  assert again.exit_code is None, again.output[-2000:]
  joined = processes.steps(0)[-1]['step']
  processes.until(
    lambda: processes.steps(0)[-1]['step'] >= joined + 50,
    START_S,
    'the learner trains on',
  )
  applied = _applied(processes)
  assert again.exit_code is None, again.output[-2000:]
  assert learner.exit_code is None
  _limit(again, resource.RLIM_INFINITY)
  processes.until_merged(0)
  rounds = [line['round'] for line in processes.tape('Publish')]
  assert rounds == list(range(1, len(rounds) + 1))
  _, continued = processes.tape('Started')
  for update in applied:
    # The learner may have missed the last rounds of the first syncer.
    assert update['version'] <= continued['versions'][update['fragment']]


def _applied(processes: Processes) -> list[dict]:
  """Returns the updates that the learner has taken in."""
  lines = read_jsonl(processes.workdir.learner_tape(0))
  return [line for line in lines if line['kind'] == 'Apply']
