# SPDX-License-Identifier: Apache-2.0
"""One process may save and load at once; Orbax itself may not."""

import contextlib
import threading

import jax
import numpy as np
import pytest

from diloco.checkpoint import orbax_files
from diloco.checkpoint.parameters import read_parameters, write_parameters
from diloco.checkpoint.store import Checkpoints

pytestmark = pytest.mark.beside

FOLDERS, SAVES, SAVE_S = 4, 8, 120.0
ANOTHER_S = 1.0  # In which another save would begin, if it could.


class Counting:
  """Stands in for Orbax; counts the saves that are in it at a time."""

  def __init__(self):
    self.most = 0
    self._inside = 0
    self._changed = threading.Condition()

  def save_checkpointables(self, path, *_, **__):
    with self._changed:
      self._inside += 1
      self.most = max(self.most, self._inside)
      self._changed.notify_all()
      self._changed.wait_for(lambda: self.most > 1, ANOTHER_S)
      self._inside -= 1
    path.mkdir()


def test_one_save_of_a_process_is_written_at_a_time(tmp_path, monkeypatch):
  counting, said = Counting(), []
  monkeypatch.setattr(orbax_files, 'orbax', lambda: counting)
  monkeypatch.setattr(orbax_files, '_context', contextlib.nullcontext)
  stores = [Checkpoints(tmp_path / str(i), 1, said.append) for i in (0, 1)]
  for store in stores:
    assert store.save(1, {'a': np.zeros(9)}, {})
  for store in stores:
    assert store.wait(SAVE_S)
    store.close(SAVE_S)
  assert (counting.most, said) == (1, []), 'two saves were written at once'


@pytest.mark.parametrize('load', [read_parameters, 'state'])
def test_nothing_is_loaded_while_a_save_is_written(tmp_path, load):
  write_parameters(tmp_path / 'parameters', {'a': np.zeros(9)})
  store = Checkpoints(tmp_path / 'store', 1, print)
  assert store.save(1, {'a': np.zeros(9)}, {})
  assert store.wait(SAVE_S)
  store.close(SAVE_S)
  like = {'a': jax.ShapeDtypeStruct((9,), np.float64)}
  loaded = threading.Event()

  def read():
    if load == 'state':
      assert store.restore(like)
    else:
      load(tmp_path / 'parameters')
    loaded.set()

  reader = threading.Thread(target=read)
  with orbax_files.OPERATING:
    reader.start()
    assert not loaded.wait(ANOTHER_S), 'it was loaded beside a save'
  assert loaded.wait(SAVE_S)
  reader.join()
