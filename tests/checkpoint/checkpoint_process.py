# SPDX-License-Identifier: Apache-2.0
"""Saves and restores in a process that can be killed or limited.

Run by `test_checkpoint_processes.py`; prints one JSON per line.
"""

import itertools
import json
import pathlib
import resource
import sys

import numpy as np
from absl import logging

from diloco.checkpoint.store import Checkpoints
from diloco.run import logs

SIZE = 1 << 22  # Values; some 16 MB, so that a save takes a while.
SAVE_S = 60.0


def tell(**fields):
  print(json.dumps(fields), flush=True)


def checkpoints(folder: pathlib.Path) -> Checkpoints:
  return Checkpoints(folder, 2, logging.warning)


def arrays_of(step: int) -> dict:
  return {'a': np.full(SIZE, step, np.float32), 'b': np.full(3, step)}


def keep_saving(folder: pathlib.Path):
  """Goes on from the newest checkpoint until it is killed."""
  store = checkpoints(folder)
  found = store.restore(arrays_of(0))
  newest = found.step if found else 0
  if found:
    assert found.meta == {'step': newest}
    assert all((x == newest).all() for x in found.arrays.values())
  tell(restored=newest)
  for step in itertools.count(newest + 1):
    assert store.save(step, arrays_of(step), {'step': step})
    tell(begun=step)
    assert store.wait(SAVE_S)
    tell(written=step)


def full_disk(folder: pathlib.Path):
  """Saves, fails where no file may grow, saves again."""
  logging.use_absl_handler()  # As in a real process.
  logs.keep_ours()
  store = checkpoints(folder)
  unlimited = resource.RLIM_INFINITY
  for step, bytes_max in ((1, unlimited), (2, 1 << 20), (3, unlimited)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, unlimited))
    assert store.save(step, arrays_of(step), {})
    assert store.wait(SAVE_S)
    tell(failed=store.failed, folder=sorted(p.name for p in folder.iterdir()))
  store.close(SAVE_S)


if __name__ == '__main__':
  task = {f.__name__: f for f in (keep_saving, full_disk)}
  task[sys.argv[1]](pathlib.Path(sys.argv[2]))
