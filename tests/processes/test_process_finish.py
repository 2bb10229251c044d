# SPDX-License-Identifier: Apache-2.0
"""The syncer is killed while the run finishes; another process ends it."""

import signal

import pytest

from tests.processes.processes import START_S, Processes

pytestmark = pytest.mark.soak

FRAGMENTS = 2  # P of the tiny configuration.
LEARNERS = (0, 1)

# A step takes long enough for the syncer to be killed before any learner is at
# the boundary at which it would hand in.
OVERRIDES = (
  'run.step_floor_s=4.0',
  'protocol.patience=6.0',
  'protocol.total_steps=8',
  'protocol.sync_every_steps=4',
  'protocol.quorum=2',
  'checkpoint.syncer_every_rounds=1',
)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  root = tmp_path_factory.mktemp('finish')
  with Processes(root, *OVERRIDES) as processes:
    syncer = processes.syncer()
    learners = [processes.learner(m) for m in LEARNERS]
    processes.until(
      lambda: processes.tape('finishing'), START_S, 'the run finishes'
    )
    syncer.send(signal.SIGKILL)
    processes.exit_code(syncer)
    assert not processes.tape('End'), 'it was over before the syncer died'
    again = processes.syncer(name='syncer-again')
    codes = {
      each.name: processes.exit_code(each) for each in (*learners, again)
    }
    yield processes, codes


def _last_round(processes: Processes) -> int:
  [line] = processes.tape('finishing')
  return int(line['reason'].removeprefix('last round '))


def test_everybody_leaves_in_good_order(finished):
  processes, codes = finished
  assert set(codes.values()) == {0}, processes.tails()


def test_the_run_ends_once(finished):
  processes, _ = finished
  [end] = processes.tape('End')
  assert end['closed_round'] == _last_round(processes)


def test_no_round_is_asked_for_beyond_the_last(finished):
  processes, _ = finished
  rounds = [line['round'] for line in processes.tape('Merge')]
  assert max(rounds) <= _last_round(processes)


def test_the_last_rounds_merge_what_everybody_hands_in(finished):
  """Offers died with the session in which they were made."""
  processes, _ = finished
  last = _last_round(processes)
  merged = {
    line['round']: [share['learner'] for share in line['shares']]
    for line in processes.tape('Publish')
  }
  for round_ in range(last - FRAGMENTS + 1, last + 1):
    assert merged.get(round_) == list(LEARNERS), merged
