# SPDX-License-Identifier: Apache-2.0
"""The whole runtime in one process, over data planes that fail."""

import pytest

from diloco.metrics.jsonl import read_jsonl
from tests.in_process.in_process import LEARNERS, Run
from tests.transport.faulty import Faults

pytestmark = pytest.mark.beside


@pytest.fixture(scope='module')
def broken(tmp_path_factory):
  """A run in which a quarter of all pulls bring a flipped byte or nothing."""
  faults = Faults(corrupt=0.15, lost=0.1)
  # Otherwise a fast machine makes all steps within a few rounds.
  run = Run(tmp_path_factory.mktemp('broken'), faults, step_floor_s=0.02)
  run.finish()
  return run


def test_the_run_ends_in_good_order_all_the_same(broken):
  assert [left.reason for left in broken.left] == ['run is over'] * LEARNERS


def test_every_learner_holds_the_final_bytes(broken):
  """Full fragments mend mismatches."""
  expected = broken.syncing._model.crcs()
  assert [host.crcs() for host in broken.hosts] == [expected] * LEARNERS


def test_refused_payloads_are_named_on_the_tape(broken):
  reasons = ' '.join(
    line['reason']
    for line in read_jsonl(broken.workdir.tape)
    if line['kind'] == 'pull_failed'
  )
  assert 'Corrupt: ' in reasons
  assert 'PeerLost: ' in reasons


def test_synchronous_diloco_in_the_real_runtime(tmp_path):
  """τ = 0, P = 1, K = M: each learner waits, and none waits for ever.

  The second learner may be in the middle of its steps when the other closes a
  round alone; from the first common round on they keep step.
  """
  run = Run(
    tmp_path,
    Faults(),
    quorum=LEARNERS,
    overlap_steps=0,
    fragments=1,
    sync_every_steps=4,
  )
  run.finish()
  merges = [m for m in read_jsonl(run.workdir.tape) if m['kind'] == 'Merge']
  assert len(merges) > 20
  shares = [m['shares'] for m in merges]
  first = next(i for i, each in enumerate(shares) if len(each) == LEARNERS)
  steps = [s['c_steps'] for each in shares[first + 1 : -1] for s in each]
  assert set(steps) == {4}, f'{first=} {steps=}'
