# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints, written by Orbax concurrently with training.

`save` returns at once; a thread does the rest, and until it is done the caller
leaves the arrays as they are. It is a thread of this package's instead of
Orbax's for two reasons: with 60 arrays Orbax works some 35 ms in the caller's
thread, and the CRCs, which it lacks, must be known when it begins. One save at
a time is in progress. A save that fails never harms training, and an unreadable
checkpoint never keeps a process from starting with a readable one.

The hosts of a learner save together, into one folder that all of them see.
"""

import dataclasses
import json
import math
import pathlib
import queue
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco.checkpoint import arrays as checkpoint_arrays
from diloco.checkpoint import folders, orbax_files
from diloco.checkpoint.arrays import BrokenRecord

FORMAT = 2  # 1 had arrays packed in volumes, which Orbax could not name.
REMOVALS_MAX = 20  # Of what a failed save has left; the next save does, too.
REMOVE_AGAIN_S = 0.1
END_CHARS = 160  # Logged characters of an error's text.
# What TensorStore may append to the cause, such as [tensorstore_spec='{…}'].
_ANNOTATION = re.compile(r" \[[\w ]+='(?:[^'\\]|\\.)*'\]")

# What Orbax, TensorStore and this package raise over corrupt files.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, BrokenRecord)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A checkpoint that was restored."""

  path: pathlib.Path
  step: int
  meta: dict  # As given to `save`.
  arrays: Any  # In the tree that was requested.


class Checkpoints:
  """Saves to one folder and restores from it.

  For one thread. A checkpoint is the folder STEP. One that was being written
  when the process died is removed by the next save, an unreadable one set
  aside: see `folders`.

  Args:
    folder: of `pathlib`, or of `etils.epath` in a bucket; made by the first
      save. No process but the hosts of one learner may write to it.
    keep_latest: number of newest checkpoints to keep, at least 1.
    say: called with one line on what went wrong, from any thread.
    owned: False: it is another process's, and is only read.

  Attributes:
    failed: number of saves that were begun and failed.
    on_over: called on a thread with the step of a save that is over, whether it
      was completed or not.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    keep_latest: int,
    say: Callable[[str], None],
    owned: bool = True,
  ):
    self._folder = folders.absolute(folder)
    self._keep_latest = keep_latest
    self._owned = owned
    self._say = say
    self._thread: threading.Thread | None = None
    self._jobs: queue.SimpleQueue = queue.SimpleQueue()
    self._idle = threading.Event()
    self._idle.set()
    self._newest = max(folders.steps(self._folder), default=-1)
    self.failed = 0
    self.on_over: Callable[[int], None] = lambda step: None

  @property
  def newest_step(self) -> int | None:
    """Step of the newest checkpoint, complete as far as is known."""
    return self._newest if self._newest >= 0 else None

  @property
  def saving(self) -> bool:
    """True while a save is in progress."""
    return not self._idle.is_set()

  # Saving -------------------------------------------------------------------

  def can_begin(self, step: int) -> bool:
    """Returns False, with a log line, if `save` would not begin."""
    path = self._folder / str(step)
    if self.saving:
      self._say(f'{path} is not begun: the save before is still under way')
      return False
    if step <= self._newest:
      self._say(f'{path} is not begun: there is {self._newest} already')
      return False
    return True

  def save(
    self,
    step: int,
    tree: Any,
    meta: Mapping,
    release: Callable[[], None] = lambda: None,
  ) -> bool:
    """Starts to save, on a thread.

    Args:
      step: newer than every checkpoint in the folder.
      tree: arrays, or a function that makes them on the thread. None may change
        meanwhile, and jax arrays may not be donated before `release`.
      meta: plain JSON.
      release: called once, when nothing reads the arrays any more: on the
        thread, or here if the save does not begin.

    Returns:
      False, with a log line, if the last save is still in progress or `step` is
      not newer.

    Raises:
      TypeError: `meta` is not JSON.
    """
    begins = False
    try:
      meta = json.loads(json.dumps(meta))  # A copy; fails here, not later.
      begins = self.can_begin(step)
    finally:
      if not begins:
        release()
    if not begins:
      return False
    self._idle.clear()
    # A list, so that the thread can let go of it.
    self._jobs.put((step, [tree], meta, release))
    if self._thread is None:
      # A daemon: without `close`, the process need not wait for a slow disk.
      self._thread = threading.Thread(
        target=self._run, name='checkpoint', daemon=True
      )
      self._thread.start()
    return True

  def wait(self, timeout_s: float) -> bool:
    """Waits for the save in progress; returns True if it is over."""
    return self._idle.wait(timeout_s)

  def close(self, timeout_s: float) -> None:
    """Waits for the save in progress; a slower one is lost, and logged."""
    if not self.wait(timeout_s):
      self._say(
        f'{self._folder}: the save under way did not end in {timeout_s} s'
      )
      return
    if self._thread is not None:
      self._jobs.put(None)
      self._thread.join(timeout_s)
      self._thread = None

  def _run(self):
    """Writes one checkpoint after the other, on the thread."""
    while (job := self._jobs.get()) is not None:
      try:
        self._save(*job)
      finally:
        step, job = job[0], None
        self._idle.set()
        self.on_over(step)

  def _save(self, step: int, trees: list, meta, release):
    """Writes a checkpoint, on the thread."""
    path = self._folder / str(step)
    try:
      tree = trees.pop()
      self._write(step, tree() if callable(tree) else tree, meta)
      self._newest = step
    # No error of a save may end the training.
    except Exception as error:  # noqa: BLE001 - said and counted.
      self.failed += 1
      self._say(f'{path} could not be written: {_line(error)}')
      for _ in range(REMOVALS_MAX):  # Orbax's threads may still write there.
        if folders.remove_unfinished(path):
          break
        threading.Event().wait(REMOVE_AGAIN_S)
    finally:
      tree = None
      release()

  def _write(self, step: int, tree, meta):
    path = self._folder / str(step)
    leaves = {
      name: x if isinstance(x, jax.Array) else np.asarray(x)
      for name, x in checkpoint_arrays.named(tree).items()
    }
    kinds = checkpoint_arrays.kinds(leaves)
    text = json.dumps({'format': FORMAT, 'meta': meta, 'arrays': kinds})
    filled = {name: x for name, x in leaves.items() if x.size}
    crcs = json.dumps(checkpoint_arrays.crcs_of(filled))
    if orbax_files.is_first():
      self._folder.mkdir(parents=True, exist_ok=True)
      for left in folders.unfinished(self._folder):
        folders.remove(left)
    orbax_files.save(path, checkpoint_arrays.nested(filled), text, crcs)
    if not folders.is_whole(path):
      raise FileNotFoundError('it is not in the folder of this host')
    if orbax_files.is_first():
      for old in sorted(folders.steps(self._folder))[: -self._keep_latest]:
        folders.remove(self._folder / str(old))

  # Restoring ----------------------------------------------------------------

  def newest_meta(self) -> dict | None:
    """Returns the `meta` of the newest checkpoint whose text is intact."""
    for step in sorted(folders.steps(self._folder), reverse=True):
      path = self._folder / str(step)
      text = _read_text(
        path, lambda why, path=path: self._say(f'{path}: {why}')
      )
      if text is not None:
        return text['meta']
    return None

  def readable(self) -> tuple[int, ...]:
    """Returns the steps of checkpoints whose text is intact, ascending."""
    steps = sorted(folders.steps(self._folder))
    return tuple(s for s in steps if _read_text(self._folder / str(s)))

  def restore(
    self,
    likes: Any,
    check: Callable[[dict], None] = lambda meta: None,
    step: int | None = None,
  ) -> Checkpoint | None:
    """Restores the newest intact checkpoint; logs why newer ones are not.

    The hosts of a learner call it for one step, all of them.

    Args:
      likes: the expected tree: leaves of shape and dtype. A leaf with a
        sharding becomes a jax array of it, others stay on the host.
      check: called with `meta` first; its errors are raised here.
      step: that checkpoint or none.

    Raises:
      BrokenRecord: it is of an earlier version of this program.
    """
    self._idle.wait()
    for path in folders.unfinished(self._folder):
      self._say(f'{path} is passed over: half written')
    leaves = checkpoint_arrays.named(likes)
    kinds = checkpoint_arrays.kinds(leaves)
    steps = [s for s in folders.steps(self._folder) if step in (None, s)]
    for step in sorted(steps, reverse=True):
      path = self._folder / str(step)
      text = _read_text(path, lambda why, path=path: self._set_aside(path, why))
      if text is None:
        continue
      check(text['meta'])
      try:
        checkpoint_arrays.compare(text['arrays'], kinds)
        arrays = _read_arrays(path, leaves)
      except UNREADABLE as error:
        self._set_aside(path, _line(error))
        continue
      tree = jax.tree.structure(likes).unflatten(arrays[x] for x in leaves)
      return Checkpoint(path, step, text['meta'], tree)
    return None

  def set_aside_after(self, step: int) -> None:
    """Sets aside checkpoints of later steps, which not all hosts can read.

    Otherwise a save of such a step would be refused, and this one taken for it,
    though it is of another course of the run.
    """
    self._idle.wait()
    for newer in sorted(s for s in folders.steps(self._folder) if s > step):
      path = self._folder / str(newer)
      self._set_aside(path, 'another host can not read it')
    self._newest = step

  def _set_aside(self, path: pathlib.Path, why: str):
    self._say(f'{path} is passed over: {why}')
    if not self._owned:
      return
    try:
      folders.set_aside(path)
    except FileNotFoundError:
      pass  # Another host was first.
    except OSError as problem:
      if not folders.on_disk(path):
        raise  # It can not be reached now, and may be intact.
      self._say(f'{path} could not be renamed: {_line(problem)}')
    self._newest = max(folders.steps(self._folder), default=-1)


def newest_after(folder: pathlib.Path, step: int) -> Checkpoint | None:
  """Returns the newest checkpoint after `step`, for processes that only read.

  Its arrays are by path, such as 'theta/0/NAME', not in their tree. None if
  none is intact: another process writes and removes them meanwhile, and only
  that one sets broken ones aside.

  Raises:
    BrokenRecord: it is of an earlier version of this program.
  """
  steps = (s for s in folders.steps(folder) if s > step)
  for each in sorted(steps, reverse=True):
    path = folders.absolute(folder / str(each))
    text = _read_text(path)
    if text is None:
      continue
    try:
      likes = {
        name: np.broadcast_to(np.empty((), jnp.dtype(dtype)), shape)
        for name, (dtype, shape) in text['arrays'].items()
      }
      arrays = _read_arrays(path, likes)
    except UNREADABLE:
      continue
    return Checkpoint(path, each, text['meta'], arrays)
  return None


def _read_text(
  path: pathlib.Path, tell: Callable[[str], object] = lambda why: None
) -> dict | None:
  """Returns the text of a checkpoint, verified by its CRC; None if broken.

  Args:
    tell: called with the reason.

  Raises:
    BrokenRecord: it is of an earlier version of this program.
  """
  try:
    text = json.loads(orbax_files.read_text(path))
    found = text['format']
  except UNREADABLE as error:
    tell(_line(error))
    return None
  if found != FORMAT:
    raise BrokenRecord(old_format(path))
  return text


def old_format(path: pathlib.Path) -> str:
  """Returns what to do about a checkpoint of an earlier version."""
  return (
    f'{path} is of an earlier version of this program: go on with that '
    'version, or begin anew in another folder'
  )


def _read_arrays(path: pathlib.Path, likes: Mapping[str, Any]) -> dict:
  """Returns arrays by name, verified by their CRCs.

  Args:
    likes: all that were saved, by name.
  """
  filled = {name: like for name, like in likes.items() if math.prod(like.shape)}
  abstract = {
    name: np.ndarray
    if (sharding := getattr(like, 'sharding', None)) is None
    else jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)
    for name, like in filled.items()
  }
  tree = orbax_files.load(path, checkpoint_arrays.nested(abstract))
  arrays = checkpoint_arrays.named(tree)
  crcs: checkpoint_arrays.Crcs = {}
  for text in orbax_files.read_crcs(path):
    for name, boxes in json.loads(text).items():
      crcs[name] = crcs.get(name, {}) | boxes
  checkpoint_arrays.verify(arrays, crcs)
  # Orbax does not save them.
  return arrays | {
    name: np.empty(likes[name].shape, likes[name].dtype)
    for name in likes.keys() - filled.keys()
  }


def _line(error: Exception) -> str:
  """Formats an error as one line; a long text is cut in the middle."""
  text = _ANNOTATION.sub('', ' '.join(str(error).split()))
  if len(text) > 2 * END_CHARS:  # TensorStore names the cause last.
    text = f'{text[:END_CHARS]} … {text[-END_CHARS:]}'
  return f'{type(error).__name__}: {text}'
