# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints, written by Orbax concurrently with training.

`save` returns at once where the caller can leave the arrays as they are until
they are written, and otherwise after a copy of what lies on devices; a thread
does the rest. This package has a thread of its own instead of Orbax's for two
reasons: with 60 arrays Orbax works some 35 ms in the caller's thread, and the
CRCs, which it lacks, must be known when it begins. One save at a time is in
progress, and its buffers are kept for the next one. A save that fails never
harms training, and an unreadable checkpoint never keeps a process from starting
with a readable one.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from diloco.checkpoint import arrays as checkpoint_arrays
from diloco.checkpoint import orbax_files
from diloco.checkpoint.arrays import BrokenRecord
from diloco.checkpoint.orbax_files import UNFINISHED

FORMAT = 1  # Format of the text in Orbax's checkpoint.
BROKEN = '.broken'
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

  For one thread. A checkpoint is the folder STEP; one that is being written, or
  was when the process died, has another name, and is removed by the next save.
  An unreadable one is renamed to STEP.broken for inspection.

  Args:
    folder: made by the first save; no other process may write to it.
    keep_latest: number of newest checkpoints to keep, at least 1.
    say: called with one line on what went wrong, from any thread.
    files: how they are written; `HostFiles` for one process among several.

  Attributes:
    failed: number of saves that were begun and failed.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    keep_latest: int,
    say: Callable[[str], None],
    files: orbax_files.Files = orbax_files.SoleFiles,
  ):
    self._folder = folder.absolute()
    self._files = files
    self._keep_latest = keep_latest
    self._say = say
    self._opened: orbax_files.SoleFiles | orbax_files.HostFiles | None = None
    self._thread: threading.Thread | None = None
    self._jobs: queue.SimpleQueue = queue.SimpleQueue()
    self._idle = threading.Event()
    self._idle.set()
    self._kept: list[np.ndarray] = []  # Volumes, to be written to again.
    self._newest = max(self._steps(), default=-1)
    self.failed = 0

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
    arrays: Any,
    meta: Mapping,
    release: Callable[[], None] | None = None,
  ) -> bool:
    """Starts to save.

    Without `release` it returns after the copies from the devices, which wait
    for the computations that make the arrays. With it, it returns at once, and
    all of that is the thread's.

    Args:
      step: newer than every checkpoint in the folder.
      arrays: a tree. Without `release`, jax arrays may be donated as soon as
        this returns; numpy arrays may not be written to any more.
      meta: plain JSON.
      release: called once, when the jax arrays may be donated: on the thread,
        or here if the save does not begin.

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
      if begins and release is None:
        arrays = checkpoint_arrays.to_host(arrays)
    finally:
      if release is not None and not begins:
        release()
    if not begins:
      return False
    self._idle.clear()
    # A list, so that the thread can let go of it.
    self._jobs.put((step, [arrays], meta, release))
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
    if self._opened is not None:
      self._opened.close()
      self._opened = None

  def _run(self):
    """Writes one checkpoint after the other, on the thread."""
    while (job := self._jobs.get()) is not None:
      try:
        self._save(*job)
      finally:
        job = None
        self._idle.set()

  def _save(self, step: int, arrays: list, meta, release):
    """Writes a checkpoint, on the thread."""
    path = self._folder / str(step)
    try:
      host = arrays.pop()
      if release is not None:  # On accelerators this frees the copy there.
        host = checkpoint_arrays.to_host(host, views=True)
      self._write(step, host, meta)
      self._newest = step
    # No error of a save may end the training.
    except Exception as error:  # noqa: BLE001 - said and counted.
      self.failed += 1
      self._say(f'{path} could not be written: {_line(error)}')
      self._opened = None  # It would raise the same error again.
      unfinished = path.with_name(path.name + UNFINISHED)
      for _ in range(REMOVALS_MAX):  # Orbax's threads may still write there.
        shutil.rmtree(unfinished, ignore_errors=True)
        if not unfinished.exists():
          break
        threading.Event().wait(REMOVE_AGAIN_S)
      self._kept = []
    finally:
      host = None  # The last view.
      if release is not None:
        release()

  def _write(self, step: int, host, meta):
    vectors, index = checkpoint_arrays.pack(host, self._kept)
    self._kept = [x for x in vectors if x.flags.owndata]
    text = json.dumps({'format': FORMAT, 'meta': meta, 'arrays': index})
    if self._opened is None:  # By the thread.
      self._opened = self._files(self._folder, self._keep_latest)
    named = {f'{i:04d}': v for i, v in enumerate(vectors)}
    with orbax_files.OPERATING:
      self._opened.save(step, named, text)

  # Restoring ----------------------------------------------------------------

  def newest_meta(self) -> dict | None:
    """Returns the `meta` of the newest checkpoint whose text is intact."""
    for step in sorted(self._steps(), reverse=True):
      try:
        return _read_text(self._files, self._folder / str(step))['meta']
      except UNREADABLE as error:
        self._say(f'{self._folder / str(step)}: {_line(error)}')
    return None

  def readable(self) -> tuple[int, ...]:
    """Returns the steps of checkpoints whose text is intact, ascending."""
    steps = []
    for step in sorted(self._steps()):
      with contextlib.suppress(*UNREADABLE):
        _read_text(self._files, self._folder / str(step))
        steps.append(step)
    return tuple(steps)

  def restore(
    self,
    likes: Any,
    check: Callable[[dict], None] = lambda meta: None,
    step: int | None = None,
  ) -> Checkpoint | None:
    """Restores the newest intact checkpoint; logs why newer ones are not.

    Args:
      likes: the expected tree: leaves of shape and dtype. A leaf with a
        sharding is put there, others stay on the host.
      check: called with `meta` first; its errors are raised here.
      step: that checkpoint or none.
    """
    self._idle.wait()
    for path in sorted(self._folder.glob('*' + UNFINISHED)):
      self._say(f'{path} is passed over: half written')
    steps = [s for s in self._steps() if step in (None, s)]
    for step in sorted(steps, reverse=True):
      path = self._folder / str(step)
      try:
        text = _read_text(self._files, path)
      except UNREADABLE as error:
        self._set_aside(path, _line(error))
        continue
      check(text['meta'])
      try:
        arrays = _read_arrays(self._files, path, text['arrays'])
        checkpoint_arrays.compare(arrays, likes)
      except UNREADABLE as error:
        self._set_aside(path, _line(error))
        continue
      placed = checkpoint_arrays.place(arrays, likes)
      return Checkpoint(path, step, text['meta'], placed)
    return None

  def set_aside_after(self, step: int) -> None:
    """Sets aside checkpoints of later steps, which other hosts do not have.

    Otherwise a save of such a step would be refused here, and this one taken
    for it, though it is of another course of the run.
    """
    self._idle.wait()
    for newer in sorted(each for each in self._steps() if each > step):
      path = self._folder / str(newer)
      self._set_aside(path, 'another host has none of this step')

  def _set_aside(self, path: pathlib.Path, why: str):
    """Renames a checkpoint out of the way of newer ones of the same step."""
    self._say(f'{path} is passed over: {why}')
    aside = path.with_name(path.name + BROKEN)
    shutil.rmtree(aside, ignore_errors=True)
    try:
      os.replace(path, aside)
    except OSError as problem:
      self._say(f'{path} could not be renamed: {_line(problem)}')
    self._opened = None  # It has listed what is there.
    self._newest = max(self._steps(), default=-1)

  def _steps(self) -> list[int]:
    if not self._folder.is_dir():
      return []
    return [int(p.name) for p in self._folder.iterdir() if p.name.isdecimal()]


def newest_after(folder: pathlib.Path, step: int) -> Checkpoint | None:
  """Returns the newest checkpoint after `step`, for processes that only read.

  Its arrays are by path, such as '0/theta/NAME', not in their tree. None if
  none is intact: another process writes and removes them meanwhile, and only
  that one sets broken ones aside.
  """
  names = folder.iterdir() if folder.is_dir() else ()
  steps = (int(path.name) for path in names if path.name.isdecimal())
  for each in sorted((s for s in steps if s > step), reverse=True):
    path = (folder / str(each)).absolute()
    try:
      text = _read_text(orbax_files.SoleFiles, path)
      arrays = _read_arrays(orbax_files.SoleFiles, path, text['arrays'])
    except UNREADABLE:
      continue
    return Checkpoint(path, each, text['meta'], arrays)
  return None


def _read_text(files: orbax_files.Files, path: pathlib.Path) -> dict:
  """Returns the text of a checkpoint, verified by its CRC."""
  text = json.loads(files.read_text(path))
  if text['format'] != FORMAT:
    raise BrokenRecord(f'its format is {text["format"]}, not {FORMAT}')
  return text


def _read_arrays(
  files: orbax_files.Files, path: pathlib.Path, index: Mapping
) -> dict:
  volumes = files.read_volumes(path)
  return checkpoint_arrays.unpack(
    [volumes[name] for name in sorted(volumes)], index
  )


def _line(error: Exception) -> str:
  """Formats an error as one line; a long text is cut in the middle."""
  text = _ANNOTATION.sub('', ' '.join(str(error).split()))
  if len(text) > 2 * END_CHARS:  # TensorStore names the cause last.
    text = f'{text[:END_CHARS]} … {text[-END_CHARS:]}'
  return f'{type(error).__name__}: {text}'
