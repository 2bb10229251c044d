# SPDX-License-Identifier: Apache-2.0
"""The faults of a chaos run on a page, and folders that have none."""

import json

import pytest

from diloco.metrics import recorded_run
from diloco.metrics.workdir import Workdir

HIT = {
  'number': 1,
  'kind': 'cut',
  'target': 'learner-1',
  'begun_s': 5.0,
  'counted': 70,
  'back_s': 4.5,
  'lost_s': 0.0,
  'stall_s': 0.03,
  'failed': '',
}
MISSED = {**HIT, 'number': 2, 'begun_s': None, 'failed': 'it did not run'}


def written(root, outcomes):
  workdir = Workdir(root)
  workdir.chaos.mkdir()
  (workdir.chaos / 'verdict.json').write_text(
    json.dumps({'outcomes': outcomes})
  )
  (workdir.chaos / 'course.json').write_text(json.dumps({'began_s': 112.0}))
  return workdir


def test_times_are_counted_from_the_first_learner_s_readiness(tmp_path):
  found = recorded_run.read_faults(written(tmp_path, [HIT, MISSED]), 100.0)
  assert [fault.at_s for fault in found] == [17.0, None]
  assert found[0].back_s == 4.5
  assert found[1].failed == 'it did not run'


def test_a_run_without_a_plan_has_no_faults(tmp_path):
  assert recorded_run.read_faults(Workdir(tmp_path), 0.0) == ()


def test_a_broken_verdict_is_named(tmp_path):
  workdir = written(tmp_path, [{'number': 1}])
  with pytest.raises(ValueError, match='no verdict'):
    recorded_run.read_faults(workdir, 0.0)
