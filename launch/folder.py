# SPDX-License-Identifier: Apache-2.0
"""Takes hold of a run's folder: nobody else's run, nobody else's files."""

import fcntl
import pathlib
import shutil
from typing import BinaryIO

from diloco.config_values import ConfigError
from diloco.metrics.workdir import Workdir


def occupy(root: pathlib.Path, overwrite: bool) -> tuple[Workdir, BinaryIO]:
  """The empty folder of a run that starts; held as long as the file is open.

  Args:
    root: is created where it does not exist.
    overwrite: removes the run that `root` holds, and nothing else.

  Raises:
    ConfigError: the folder is in use, holds a run, or holds something else.
  """
  workdir = Workdir(root)
  if root.exists() and not root.is_dir():
    raise ConfigError([f'--workdir={root}: is a file, give a folder'])
  found = {path.name for path in root.iterdir()} if root.exists() else set()
  if foreign := sorted(found - set(Workdir.CONTENTS)):
    raise ConfigError(
      [
        f'--workdir={root}: holds {foreign[0]!r}, which is not of a run; give '
        'an empty folder or one that does not exist'
      ]
    )
  root.mkdir(parents=True, exist_ok=True)
  lock = workdir.lock.open('ab')
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    lock.close()
    raise ConfigError(
      [
        f'--workdir={root}: another launcher is running there; wait for it or '
        'give another folder'
      ]
    ) from None
  if found - {workdir.lock.name}:
    if not overwrite:
      lock.close()
      raise ConfigError(
        [
          f'--workdir={root}: already holds a run; give another folder, or '
          '--overwrite to remove that run'
        ]
      )
    _remove(root, found - {workdir.lock.name})
  return workdir, lock


def _remove(root: pathlib.Path, contents: set[str]) -> None:
  for name in sorted(contents):
    path = root / name
    if path.is_dir() and not path.is_symlink():
      shutil.rmtree(path)
    else:
      path.unlink()
