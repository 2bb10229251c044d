# SPDX-License-Identifier: Apache-2.0
"""Checkpoints come back to the bit; broken ones are passed over."""

import collections
import json
import queue
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.checkpoint import orbax_files
from diloco.checkpoint import store as store_lib
from diloco.checkpoint.arrays import BrokenRecord
from diloco.checkpoint.folders import UNFINISHED
from diloco.checkpoint.learner_records import LearnerRecords
from diloco.checkpoint.store import Checkpoints

SAVE_S = 60.0
Moments = collections.namedtuple('Moments', 'mean count')


@pytest.fixture
def said():
  return []


@pytest.fixture
def store(tmp_path, said):
  store = Checkpoints(tmp_path, 2, said.append)
  yield store
  store.close(SAVE_S)


def _save(store, step, tree=None):
  tree = {'a': np.full(9, step)} if tree is None else tree
  assert store.save(step, tree, {'of': step})
  assert store.wait(SAVE_S)


def _like(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _steps(folder):
  return sorted(int(p.name) for p in folder.iterdir())


def _largest(folder):
  files = [path for path in folder.rglob('*') if path.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def test_a_tree_comes_back_to_the_bit(store):
  rng = np.random.default_rng(0)
  tree = {
    'params': {'a/b': rng.normal(size=(3, 5)).astype(np.float32)},
    'moments': Moments(jnp.ones((2, 2), jnp.bfloat16), np.int32(7)),
    'bases': {0: {'x': np.float32([np.nan, -0.0])}, 1: {'y': np.zeros((0, 2))}},
  }
  _save(store, 3, tree)
  found = store.restore(_like(tree))
  assert (found.step, found.meta) == (3, {'of': 3})
  assert jax.tree.structure(found.arrays) == jax.tree.structure(tree)
  for mine, theirs in zip(jax.tree.leaves(tree), jax.tree.leaves(found.arrays)):
    assert theirs.dtype == mine.dtype
    assert theirs.tobytes() == np.asarray(mine).tobytes()


def test_arrays_may_be_given_away_once_they_are_released(store):
  step = jax.jit(lambda x: 2 * x + 1, donate_argnums=0)
  given = jnp.arange(1 << 20, dtype=jnp.float32)
  expected = np.array(given)
  released = threading.Event()
  assert store.save(1, {'a': given}, {}, released.set)
  assert released.wait(SAVE_S)
  for _ in range(20):  # The memory is used again and again.
    given = step(given)
  jax.block_until_ready(given)
  assert store.wait(SAVE_S)
  found = store.restore({'a': expected})
  np.testing.assert_array_equal(found.arrays['a'], expected)


def test_restored_arrays_may_be_given_away_too(store):
  tree = {'a': np.zeros(1 << 16, np.float32), 'b': np.ones(100, np.float32)}
  _save(store, 1, tree)
  on_device = jnp.zeros(1 << 16).sharding
  likes = _like(tree)
  likes['a'] = jax.ShapeDtypeStruct((1 << 16,), np.float32, sharding=on_device)
  found = store.restore(likes).arrays
  doubled = jax.jit(lambda x: x + 1, donate_argnums=0)(found['a'])
  assert (np.asarray(doubled) == 1).all()
  np.testing.assert_array_equal(found['b'], tree['b'])


def test_no_save_begins_while_one_is_under_way(
  store, said, tmp_path, monkeypatch
):
  gate, write = queue.SimpleQueue(), Checkpoints._write

  def wait_and_write(self, *arguments):
    gate.get(timeout=SAVE_S)
    write(self, *arguments)

  monkeypatch.setattr(Checkpoints, '_write', wait_and_write)
  assert store.save(1, {'a': np.zeros(1)}, {})
  assert not store.save(2, {'a': np.zeros(1)}, {})
  gate.put(None)
  assert store.wait(SAVE_S)
  assert said == [
    f'{tmp_path}/2 is not begun: the save before is still under way'
  ]


def test_a_step_that_another_host_lacks_is_set_aside(store, said, tmp_path):
  for step in (5, 10):
    _save(store, step)
  store.set_aside_after(5)
  assert store.newest_step == 5
  assert said == [f'{tmp_path}/10 is passed over: another host can not read it']
  _save(store, 10)
  assert store.readable() == (5, 10)


def test_no_save_begins_of_a_step_that_is_not_newer(store, said):
  _save(store, 4)
  assert not store.save(4, {'a': np.zeros(1)}, {})
  assert 'there is 4 already' in said[0]


def test_a_save_that_can_not_be_made_is_counted_and_the_next_one_made(
  tmp_path, said
):
  (tmp_path / 'store').write_text('in the way')
  store = Checkpoints(tmp_path / 'store', 2, said.append)
  _save(store, 1)
  assert store.failed == 1
  assert f'{tmp_path}/store/1 could not be written' in said[0]
  (tmp_path / 'store').unlink()
  _save(store, 2)
  assert store.restore({'a': np.full(9, 2)}).step == 2
  store.close(SAVE_S)


def test_what_a_failed_save_has_left_is_removed_once_nobody_writes_there(
  tmp_path, said, monkeypatch
):
  """Orbax's threads may still make files in it, and a removal then fails."""
  removals, rmtree = [], shutil.rmtree

  def third(path, ignore_errors):
    removals.append(path)
    if len(removals) == 3:
      rmtree(path, ignore_errors)

  def fail(path, *_):
    path.with_name(path.name + UNFINISHED).mkdir()
    raise OSError('no room')

  monkeypatch.setattr(orbax_files, 'save', fail)
  monkeypatch.setattr(shutil, 'rmtree', third)
  monkeypatch.setattr(store_lib, 'REMOVE_AGAIN_S', 0.0)
  store = Checkpoints(tmp_path, 2, said.append)
  _save(store, 1)
  assert removals == [tmp_path / f'1{UNFINISHED}'] * 3
  assert (store.failed, [*tmp_path.iterdir()]) == (1, [])
  assert store.newest_step is None
  store.close(SAVE_S)


# What is kept -----------------------------------------------------------------


def test_the_latest_are_kept(store, tmp_path):
  for step in range(1, 6):
    _save(store, step)
  assert _steps(tmp_path) == [4, 5]


# What is broken ---------------------------------------------------------------


def _truncate(folder):
  path = _largest(folder)
  path.write_bytes(path.read_bytes()[:1000])


def _flip(folder):
  path = _largest(folder)
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def _remove(folder):
  _largest(folder).unlink()


def _remove_metadata(folder):
  (folder / '_CHECKPOINT_METADATA').unlink()


def _change_metadata(folder):
  path = folder / '_CHECKPOINT_METADATA'
  text = path.read_text()
  path.write_text(text.replace(r'\"of\": 2', r'\"of\": 9'))
  assert path.read_text() != text


def _empty(folder):
  for path in folder.rglob('*'):
    if path.is_file():
      path.unlink()


@pytest.mark.parametrize(
  'damage, reason',
  [
    (_truncate, ''),
    (_flip, 'a has the CRC'),
    (_remove, ''),
    (_remove_metadata, '_CHECKPOINT_METADATA'),
    (_change_metadata, 'CRC of its metadata'),
    (_empty, ''),
  ],
)
def test_in_place_of_a_broken_one_the_older_is_taken(
  store, said, tmp_path, damage, reason
):
  tree = {'a': np.arange(100_000)}
  _save(store, 1, tree)
  _save(store, 2, tree)
  damage(tmp_path / '2')
  found = store.restore(_like(tree))
  assert found.step == 1
  assert said[0].startswith(f'{tmp_path}/2 is passed over: ')
  assert reason in said[0]


@pytest.mark.parametrize(
  'other, reason',
  [
    ({'a': np.zeros(8)}, 'a is float64[8], expected float64[4]'),
    ({'a': np.zeros(4, np.int64)}, 'a is int64[4], expected float64[4]'),
    ({'b': np.zeros(4)}, 'a is absent, expected float64[4]; b is float64[4]'),
  ],
)
def test_one_of_other_arrays_is_passed_over(store, said, other, reason):
  _save(store, 1, {'a': np.ones(4)})
  _save(store, 2, other)
  assert store.restore({'a': np.zeros(4)}).step == 1
  assert reason in said[0]


def test_a_half_written_one_is_said_and_removed_by_the_next_save(
  store, said, tmp_path
):
  _save(store, 1)
  unfinished = tmp_path / '2.orbax-checkpoint-tmp'
  unfinished.mkdir()
  later = Checkpoints(tmp_path, 2, said.append)
  assert later.restore({'a': np.zeros(9, int)}).step == 1
  assert said == [f'{unfinished} is passed over: half written']
  _save(later, 3)
  assert _steps(tmp_path) == [1, 3]
  later.close(SAVE_S)


def test_the_step_of_a_broken_one_can_be_saved_again(store, tmp_path):
  for step in (1, 2):
    _save(store, step)
  _change_metadata(tmp_path / '2')
  assert store.restore({'a': np.zeros(9, int)}).step == 1
  _save(store, 2)
  assert store.restore({'a': np.zeros(9, int)}).step == 2
  assert (tmp_path / '2.broken').is_dir()


def test_what_is_refused_for_its_metadata_stays_as_it_is(store, tmp_path):
  def refuse(meta):
    raise BrokenRecord(f'of {meta["of"]}')

  _save(store, 1)
  with pytest.raises(BrokenRecord, match='of 1'):
    store.restore({'a': np.zeros(9, int)}, refuse)
  assert _steps(tmp_path) == [1]


# What an earlier version has written ------------------------------------------


def _save_old(folder, step):
  """Leaves what tells the format, which was arrays in volumes, of a step."""
  text = json.dumps({'format': 1, 'meta': {}, 'arrays': {}})
  (folder / str(step)).mkdir(parents=True)
  metadata = {'custom_metadata': orbax_files.sealed(text)}
  path = folder / str(step) / '_CHECKPOINT_METADATA'
  path.write_text(json.dumps(metadata))


ONE_LINE = r'^[^\n]*/4 is of an earlier version[^\n]* begin anew [^\n]*$'


@pytest.mark.parametrize(
  'read',
  [
    lambda folder: Checkpoints(folder, 2, print).restore({'a': np.zeros(4)}),
    lambda folder: Checkpoints(folder, 2, print).newest_meta(),
    lambda folder: Checkpoints(folder, 2, print).readable(),
    lambda folder: store_lib.newest_after(folder, 0),
  ],
)
def test_one_of_an_earlier_version_is_refused_in_one_line(tmp_path, read):
  _save_old(tmp_path, 4)
  with pytest.raises(BrokenRecord, match=ONE_LINE):
    read(tmp_path)
  assert _steps(tmp_path) == [4], 'it was set aside'


def test_a_folder_for_each_host_is_refused_in_one_line(tmp_path):
  _save_old(tmp_path / 'host-1', 4)
  with pytest.raises(BrokenRecord, match='/host-1 is of an earlier version'):
    LearnerRecords(tmp_path, 0, {}, 2, print)
