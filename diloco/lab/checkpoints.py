# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run in one process, and where an interrupted run resumes.

At a checkpoint every learner finishes its step, and all processes are saved,
stopped and started again from what was saved: in every run, interrupted or not.
So the rest of the run depends on the checkpoint alone, and has the same bits
whichever process makes it.
"""

import io
import pathlib
import pickle
import shutil
import sys
import time
from typing import Any

import jax
import numpy as np

from diloco.checkpoint.arrays import BrokenRecord
from diloco.checkpoint.store import Checkpoints, newest_after
from diloco.config import run_config
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError

SAVE_S_MAX = 600.0  # For one save; a slower one is lost.
OBJECTS = 'objects'  # Name of the pickled objects among the arrays.
UNREADABLE = (
  pickle.UnpicklingError, AttributeError, ImportError, LookupError, TypeError,
  ValueError,
)  # fmt: skip

# What objects in a checkpoint may be made of, besides arrays.
OURS = ('diloco.', 'optax.')
PLAIN = {
  'builtins': {'bytearray', 'complex', 'frozenset', 'range', 'set', 'slice'},
  'collections': {'Counter', 'OrderedDict', 'defaultdict', 'deque'},
  'itertools': {'count'},
  'random': {'Random'},
}

Packed = dict[str, np.ndarray]


def pack(state: Any) -> Packed:
  """Splits objects into arrays, and one array with all else, pickled.

  Arrays are copied to the host; one that occurs in several places is kept once.
  """
  file, arrays = io.BytesIO(), {}
  pickler = _Pickler(file, arrays)
  pickler.dump(state)
  return arrays | {OBJECTS: np.frombuffer(file.getvalue(), np.uint8)}


def unpack(packed: Packed) -> Any:
  """Returns what `pack` was given, with numpy arrays for all arrays.

  Raises:
    pickle.UnpicklingError: it asks for something other than plain values and
      this program's own classes, so a checkpoint of somebody else runs nothing.
  """
  return _Unpickler(io.BytesIO(packed[OBJECTS].tobytes()), packed).load()


class _Pickler(pickle.Pickler):
  def __init__(self, file: io.BytesIO, arrays: Packed):
    super().__init__(file)
    self._arrays = arrays
    self._names: dict[int, str] = {}  # By identity;
    self._alive: list = []  # as long as the arrays live.

  def persistent_id(self, obj):
    if not isinstance(obj, np.ndarray | jax.Array):
      return None
    if id(obj) not in self._names:
      name = self._names[id(obj)] = f'{len(self._arrays):06d}'
      self._alive.append(obj)
      self._arrays[name] = np.array(obj)
    return self._names[id(obj)]


class _Unpickler(pickle.Unpickler):
  def __init__(self, file: io.BytesIO, arrays: Packed):
    super().__init__(file)
    self._arrays = arrays

  def persistent_load(self, pid):
    return self._arrays[pid]

  def find_class(self, module: str, name: str):
    is_ours = module.startswith(OURS)
    if is_ours or (module in PLAIN and name in PLAIN[module]):
      cls = super().find_class(module, name)
      if isinstance(cls, type):  # A function could do anything.
        return cls
    raise pickle.UnpicklingError(f'{module}.{name} is no class of a checkpoint')


class LabCheckpoints:
  """Checkpoints of a run in a folder, or none at all.

  Attributes:
    from_step: step of the checkpoint that the run resumes from; 0: none.
    state: the state there, as given to `save`; None: none.
    earlier_s: wall time of the earlier processes, up to their checkpoint.

  Args:
    folder: used for this alone; contents of another configuration, or of
      another version of jax, are removed. None: nothing is saved.

  Raises:
    ConfigError: a checkpoint of this run can't be read by this program.
  """

  def __init__(
    self, folder: pathlib.Path | None = None, config: RunConfig | None = None
  ):
    self.from_step = 0
    self.state: Any = None
    self.earlier_s = 0.0
    self._began_s = time.monotonic()
    self._folder = folder
    self._every = config.lab.checkpoint_steps if folder else 0
    if not self._every:
      return
    self._header = {
      'config': {k: str(x) for k, x in run_config.flat(config).items()},
      'jax': jax.__version__,
      'numpy': np.__version__,
      'platform': jax.default_backend(),
    }
    self._resume()
    self._checkpoints = Checkpoints(folder, keep_latest=2, say=_say)

  def steps(self, total: int) -> range:
    """Returns the global steps at which the run rests and is saved."""
    return range(self._every, total, self._every) if self._every else range(0)

  def save(self, step: int, state: Any) -> Any:
    """Saves a state; returns it as a resumed process would find it."""
    packed = pack(state)
    meta = {
      'header': self._header,
      'wall_s': self.earlier_s + time.monotonic() - self._began_s,
    }
    self._checkpoints.wait(SAVE_S_MAX)
    self._checkpoints.save(step, packed, meta)
    return unpack(packed)

  def close(self):
    """Called when the process ends."""
    if self._every:
      self._checkpoints.close(SAVE_S_MAX)

  def finish(self):
    """Called when the run is over, and its result is written."""
    if self._every:
      shutil.rmtree(self._folder, ignore_errors=True)

  def _resume(self):
    """Reads this run's newest checkpoint; removes all that is of no use."""
    try:
      newest = newest_after(self._folder, 0)
    except BrokenRecord as error:
      raise ConfigError([str(error)]) from None
    if newest is None or newest.meta.get('header') != self._header:
      shutil.rmtree(self._folder, ignore_errors=True)
      return
    try:
      self.state = unpack(newest.arrays)
    except UNREADABLE as error:
      raise ConfigError(
        f'{newest.path}: is of another version of this program ({error}): '
        f'remove {self._folder} to begin anew, or use another --workdir'
      ) from None
    self.from_step, self.earlier_s = newest.step, newest.meta['wall_s']
    for path in self._folder.iterdir():  # Newer ones can't be read.
      if path.name.isdecimal() and int(path.name) > newest.step:
        shutil.rmtree(path)


def _say(line: str):
  print(line, file=sys.stderr, flush=True)
