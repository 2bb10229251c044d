# SPDX-License-Identifier: Apache-2.0
"""One process may write to several folders at once; Orbax itself may not."""

import threading
from concurrent import futures

import numpy as np
import pytest

from diloco.checkpoint.parameters import read_parameters, write_parameters
from diloco.checkpoint.store import Checkpoints

pytestmark = pytest.mark.beside

FOLDERS, SAVES, SAVE_S = 4, 8, 120.0


def test_saves_to_several_folders_do_not_disturb_each_other(tmp_path):
  said = []
  stores = [
    Checkpoints(tmp_path / str(i), 1, 0, said.append) for i in range(FOLDERS)
  ]
  together = threading.Barrier(FOLDERS + 1, timeout=SAVE_S)

  def save(store: Checkpoints):
    for step in range(1, SAVES + 1):
      together.wait()
      store.save(step, {'a': np.full(9, step)}, {}, None)
      assert store.wait(SAVE_S), said

  def write():
    for step in range(1, SAVES + 1):
      together.wait()
      write_parameters(tmp_path / 'parameters', {'a': np.full(9, step)})

  with futures.ThreadPoolExecutor(FOLDERS + 1) as pool:
    made = [*(pool.submit(save, store) for store in stores), pool.submit(write)]
    for each in futures.as_completed(made):
      if each.exception():
        together.abort()  # Else the others would wait for it.
  for each in made:
    each.result()
  for store in stores:
    store.close(SAVE_S)
  assert said == []
  assert [store.newest_step for store in stores] == [SAVES] * FOLDERS
  assert (read_parameters(tmp_path / 'parameters')['a'] == SAVES).all()
