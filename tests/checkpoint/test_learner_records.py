# SPDX-License-Identifier: Apache-2.0
"""A restarted learner has its moments, bases and place in the data again."""

import jax
import numpy as np
import pytest

from diloco.checkpoint.arrays import BrokenRecord
from diloco.checkpoint.learner_records import HeldState, LearnerRecords

SAVE_S = 60.0
PRINTS = {'config': '1f', 'data': '2e'}
PROGRESS = {'rows': 41, 'versions': [3, 2], 'crcs': [0xFFFFFFFF, 7]}


def _records(folder, said, learner=0, **changed):
  prints = {**PRINTS, **changed}
  return LearnerRecords(folder, learner, prints, 2, said.append)


def _likes(learner):
  params, state, bases = learner
  abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    (params, state),
  )
  return (*abstract, bases)


@pytest.fixture
def saved(learner, tmp_path):
  records = _records(tmp_path, [])
  params, state, bases = learner
  assert records.save_state(
    40, HeldState(params, state), lambda: bases, PROGRESS
  )
  records.close(SAVE_S)
  return tmp_path


def test_everything_comes_back_to_the_bit(learner, saved):
  found = _records(saved, []).restore_state(*_likes(learner))
  assert found.meta['progress'] == PROGRESS
  there = tuple(found.arrays[x] for x in ('params', 'optimizer', 'bases'))
  assert jax.tree.structure(there) == jax.tree.structure(learner)
  for mine, theirs in zip(jax.tree.leaves(learner), jax.tree.leaves(there)):
    np.testing.assert_array_equal(mine, theirs, strict=True)


def test_another_runs_checkpoint_is_refused_with_what_differs(learner, saved):
  with pytest.raises(BrokenRecord, match=r'data: 3d here, 2e there$'):
    _records(saved, [], data='3d').restore_state(*_likes(learner))


def test_another_learners_checkpoint_is_refused(learner, saved):
  with pytest.raises(BrokenRecord, match=r'learner: 1 here, 0 there$'):
    _records(saved, [], learner=1).restore_state(*_likes(learner))


def test_a_longer_run_takes_them_a_shorter_one_does_not(learner, tmp_path):
  steps = 'protocol.total_steps'
  records = _records(tmp_path, [], **{steps: '60'})
  params, state, bases = learner
  records.save_state(40, HeldState(params, state), lambda: bases, PROGRESS)
  records.close(SAVE_S)
  longer = _records(tmp_path, [], **{steps: '90'})
  assert longer.restore_state(*_likes(learner)).step == 40
  with pytest.raises(BrokenRecord, match=rf'{steps}: 30 here, 60 there'):
    _records(tmp_path, [], **{steps: '30'}).restore_state(*_likes(learner))
