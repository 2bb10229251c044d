# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints, each named by its step: on a disk or in a bucket.

On a disk, of `pathlib`, Orbax writes a checkpoint under another name and
renames it: what has its name is whole. A bucket, of `etils.epath`, could only
copy object by object: there Orbax writes at once under the name, and
`COMMITTED` last. What lacks that object is unfinished.
"""

import contextlib
import os
import pathlib
import shutil

UNFINISHED = '.orbax-checkpoint-tmp'  # Of the name of what is being written.
COMMITTED = 'commit_success.txt'
BROKEN = '.broken'


def on_disk(path: pathlib.Path) -> bool:
  return isinstance(path, pathlib.Path)


def absolute(path: pathlib.Path) -> pathlib.Path:
  return path.absolute() if on_disk(path) else path


def is_whole(path: pathlib.Path) -> bool:
  """Returns True for a checkpoint of which the save was completed."""
  return path.is_dir() if on_disk(path) else (path / COMMITTED).exists()


def steps(folder: pathlib.Path) -> list[int]:
  """Returns the steps of the checkpoints; none where there is no folder."""
  return [int(path.name) for path in _numbered(folder) if is_whole(path)]


def unfinished(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns what is being saved, or was when a process died."""
  if on_disk(folder):
    return sorted(folder.glob('*' + UNFINISHED))
  return [path for path in _numbered(folder) if not is_whole(path)]


def remove_unfinished(path: pathlib.Path) -> bool:
  """Removes what a failed save of `path` has left; returns False if it stays.

  In a bucket, which may have been the cause, the next save does that.
  """
  if not on_disk(path):
    return True
  left = path.with_name(path.name + UNFINISHED)
  remove(left)
  return not left.exists()


def remove(path: pathlib.Path) -> None:
  """Removes a checkpoint as far as that is possible."""
  if on_disk(path):
    shutil.rmtree(path, ignore_errors=True)
    return
  # Each package that epath uses for buckets has errors of its own.
  with contextlib.suppress(Exception):
    # First: what remains, if this is cut off, is not taken for a checkpoint.
    (path / COMMITTED).unlink(missing_ok=True)
    path.rmtree(missing_ok=True)


def set_aside(path: pathlib.Path) -> None:
  """Takes a broken checkpoint out of the way of newer ones of the same step.

  On a disk it is renamed to STEP.broken. In a bucket it counts as unfinished
  from now on, and stays until the next save.

  Raises:
    OSError: it could not be done; FileNotFoundError: another host was first.
  """
  if on_disk(path):
    aside = path.with_name(path.name + BROKEN)
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
  else:
    (path / COMMITTED).unlink()


def _numbered(folder: pathlib.Path) -> list[pathlib.Path]:
  # Not `is_dir`: it is False, too, for a bucket that can not be reached.
  try:
    paths = list(folder.iterdir())
  except (FileNotFoundError, NotADirectoryError):
    return []
  return sorted(path for path in paths if path.name.isdecimal())
