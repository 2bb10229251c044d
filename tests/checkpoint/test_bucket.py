# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in a bucket are what they are on a disk.

The bucket is one of this process, see `fake_bucket`.
"""

import inspect
import pathlib
import re
import types

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from diloco.checkpoint.folders import COMMITTED
from diloco.checkpoint.learner_records import HeldState, LearnerRecords
from diloco.checkpoint.store import Checkpoints, newest_after
from diloco.checkpoint.syncer_records import SyncerRecords, newest_theta_after
from diloco.config import run_config
from diloco.config.sections import ConfigError
from diloco.metrics.workdir import Workdir, check_folder, folder_at
from tests.checkpoint import fake_bucket
from tests.checkpoint import test_syncer_records as syncer

ROOT = pathlib.Path(__file__).parents[2]
URL = 'gs://bucket/runs/first'
SAVE_S = 60.0
PROGRESS = {'rows': 41, 'versions': [3], 'crcs': [7]}


@pytest.fixture(scope='module')
def served():
  with fake_bucket.served() as objects:
    yield objects


@pytest.fixture
def objects(served):
  served.found.clear()
  return served


@pytest.fixture
def workdir(objects, tmp_path):
  return Workdir(tmp_path, folder_at(URL))


def _records(workdir, said, keep_latest=2):
  folder = workdir.checkpoints('learner-0')
  return LearnerRecords(folder, 0, {'config': '1f'}, keep_latest, said.append)


def _save(records, learner, *steps):
  params, moments, bases = learner
  for step in steps:
    held = HeldState(params, moments)
    assert records.save_state(step, held, lambda: bases, PROGRESS)
    assert records.wait(SAVE_S)
  assert records.failed == 0


def _restored(workdir, learner, said):
  params, moments, bases = learner
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    (params, moments),
  )
  return _records(workdir, said).restore_state(*like, bases)


def _steps(objects):
  pattern = re.compile(r'runs/first/learner-0/(\d+)/')
  return {int(m[1]) for name in objects.found if (m := pattern.match(name))}


def test_a_learner_comes_back_to_the_bit_and_keeps_the_latest(
  workdir, learner, objects
):
  said = []
  _save(_records(workdir, said), learner, 10, 20, 30)
  assert (_steps(objects), said) == ({20, 30}, [])
  found = _restored(workdir, learner, said)
  assert (found.step, found.meta['progress']) == (30, PROGRESS)
  there = tuple(found.arrays[x] for x in ('params', 'optimizer', 'bases'))
  for mine, theirs in zip(jax.tree.leaves(learner), jax.tree.leaves(there)):
    np.testing.assert_array_equal(mine, theirs, strict=True)
  assert [p.name for p in workdir.learner_checkpoints()] == ['learner-0']
  assert not list(workdir.root.iterdir()), 'nothing of it is in the workdir'


def test_a_save_that_was_cut_off_is_passed_over_and_removed_by_the_next(
  workdir, learner, objects
):
  """Orbax writes it under its own name: only its last object is missing."""
  _save(_records(workdir, []), learner, 10, 20)
  del objects.found[f'runs/first/learner-0/20/{COMMITTED}']
  said = []
  assert _restored(workdir, learner, said).step == 10
  assert said == [f'{URL}/learner-0/20 is passed over: half written']
  _save(_records(workdir, []), learner, 20)
  assert _restored(workdir, learner, []).step == 20


@pytest.mark.parametrize(
  'name', ['_CHECKPOINT_METADATA', 'state/manifest.ocdbt']
)
def test_a_broken_one_is_set_aside(workdir, learner, objects, name):
  _save(_records(workdir, []), learner, 10, 20)
  objects.put(f'runs/first/learner-0/20/{name}', b'{')
  said = []
  assert _restored(workdir, learner, said).step == 10
  assert f'{URL}/learner-0/20 is passed over: ' in said[0]
  assert f'runs/first/learner-0/20/{COMMITTED}' not in objects.found
  _save(_records(workdir, []), learner, 20)
  assert _steps(objects) == {10, 20}


def test_a_failed_save_is_counted_and_the_next_one_made(
  workdir, learner, objects, monkeypatch
):
  said = []
  records = _records(workdir, said)
  monkeypatch.setattr(records, '_folder', folder_at('gs://other/runs'))
  params, moments, bases = learner
  held = HeldState(params, moments)
  records.save_state(10, held, lambda: bases, PROGRESS)
  assert records.wait(SAVE_S)
  assert records.failed == 1
  assert 'gs://other/runs/10 could not be written' in said[0]


def test_what_another_process_has_saved_is_seen_at_once(workdir, objects):
  place = workdir.states()
  assert str(place) == f'{URL}/syncer'
  for step in (1, 2):
    assert newest_after(place, step - 1) is None
    store = Checkpoints(place, 2, print)
    assert store.save(step, {'theta': np.full(3, step)}, {})
    assert store.wait(SAVE_S)
    newest = newest_after(place, step - 1)
    assert newest.step == step
    np.testing.assert_array_equal(newest.arrays['theta'], [step] * 3)


def test_a_syncer_with_a_new_workdir_goes_on_from_the_ledger_in_there(
  workdir, tmp_path
):
  def records(name):
    folder = tmp_path / name
    return SyncerRecords(folder, workdir.states(), 2, 4, print, syncer.BATCH)

  old, theta = records('old'), {'w': np.arange(3, dtype=np.float32)}
  fragment = types.SimpleNamespace(
    version=1, theta=theta, residual={}, optimizer_state={}
  )
  ledger = syncer.LEDGER, {'of': 1}, syncer.CRCS
  assert old.save(4, [fragment], [0], ledger)
  assert old.wait(SAVE_S)
  assert records('new').read_ledger() == ledger
  newest, thetas = newest_theta_after([workdir.states()], 3)
  assert newest == 4
  np.testing.assert_array_equal(thetas[0]['w'], theta['w'])


def _alone(PATH):
  return ocp.load(
    PATH, jax.tree.map(lambda _: np.ndarray, ocp.metadata(PATH).metadata)
  )


def test_orbax_alone_reads_it_by_the_line_of_the_docs(workdir, learner):
  _save(_records(workdir, []), learner, 500)
  text = (ROOT / 'docs' / 'running.md').read_text()
  (line,) = re.findall(r'^tree = (.*)', text, re.M)
  assert ''.join(line.split()) in ''.join(inspect.getsource(_alone).split())
  theta = _alone(f'{URL}/learner-0/500')['params']
  np.testing.assert_array_equal(theta['block']['w'], learner[0]['block/w'])


def test_all_places_that_a_launcher_would_remove_are_found(workdir, objects):
  for place in ('syncer/3', 'shard-1/3', 'learner-0/9', 'another'):
    objects.put(f'runs/first/{place}/x', b'')
  names = [path.name for path in workdir.saved()]
  assert names == ['syncer', 'shard-1', 'learner-0']


# What is refused -------------------------------------------------------------


def test_a_bucket_that_can_be_written_to_is_left_as_it_was(objects):
  check_folder(URL)
  assert not objects.found


def test_a_bucket_that_is_not_there_is_refused_in_one_line(objects):
  with pytest.raises(ValueError) as refused:
    check_folder('gs://other/runs')
  line = str(refused.value)
  assert line.startswith(
    "checkpoint.folder='gs://other/runs': can not be written to: "
  )
  assert '\n' not in line


@pytest.mark.parametrize('folder', ['s3://b/x', 'gs://', 'gs://bucket/', 'a/b'])
def test_what_is_no_folder_is_refused(folder):
  with pytest.raises(ConfigError, match=rf'folder={folder!r}: must be an abso'):
    run_config.sections.CheckpointConfig(folder=folder)
