# SPDX-License-Identifier: Apache-2.0
"""A learner that is stopped says what came of its last steps."""

import re

import pytest

from diloco.metrics.writer import read_jsonl
from diloco.transport.faulty import Faults
from tests.runtime.in_process import Run

pytestmark = pytest.mark.alone

STOPPED = 1  # The learner.
OUTCOME = re.compile(
  r'of fragment (\d+) up to step (\d+): '
  r'(?:merged by round (\d+)'
  r'|only those up to step (\d+) merged by round (\d+)'
  r'|not merged|refused)'
)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """Learner 1 is stopped once it has been merged, the other goes on."""
  run = Run(tmp_path_factory.mktemp('stopped'), Faults(), step_floor_s=0.05)
  note_effect = run.syncing._board.note_effect

  def stop(effect):
    note_effect(effect)
    shares = getattr(effect, 'shares', ())
    if any(share.learner == STOPPED for share in shares):
      run.learners[STOPPED].training.stop()

  run.syncing._board.note_effect = stop
  run.finish()
  return run


def _tape(run, kind: str) -> list[dict]:
  lines = read_jsonl(run.workdir.learner_tape(STOPPED))
  return [line for line in lines if line['kind'] == kind]


def test_it_is_in_its_reason_and_on_its_tape(run):
  left = run.learners[STOPPED].left
  [line] = _tape(run, 'Leave')
  assert left.stopped
  assert line['reason'] == left.reason
  assert OUTCOME.search(left.reason), left.reason


def test_what_it_says_was_merged_was(run):
  [line] = _tape(run, 'Leave')
  merged = {
    (each['round'], share['step'])
    for each in run.tape('Publish')
    for share in each['shares']
    if share['learner'] == STOPPED
  }
  newest = max(step for _, step in merged)
  [cease] = _tape(run, 'Cease')
  for found in OUTCOME.finditer(line['reason']):
    _, step, all_by, less, less_by = found.groups()
    assert int(step) <= cease['step']
    if all_by:
      assert (int(all_by), int(step)) in merged
    elif less_by:
      assert (int(less_by), int(less)) in merged
    else:
      assert int(step) > newest
