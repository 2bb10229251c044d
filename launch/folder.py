# SPDX-License-Identifier: Apache-2.0
"""Takes hold of a run's folder: nobody else's run, nobody else's files."""

import fcntl
import json
import pathlib
import shutil
from typing import BinaryIO

from diloco import config as configs
from diloco.config import RunConfig
from diloco.config_values import ConfigError
from diloco.metrics.workdir import Workdir


def occupy(
  root: pathlib.Path, overwrite: bool, config: RunConfig | None = None
) -> tuple[Workdir, BinaryIO, bool]:
  """The folder of a run that starts, or goes on; held while the file is open.

  A run that was stopped goes on: its processes find what they left there.

  Args:
    root: is created where it does not exist.
    overwrite: removes the run that `root` holds, and nothing else.
    config: of the run that is to be started; None: it begins anew, always.

  Returns:
    The folder, the open lock, and whether the folder's run goes on.

  Raises:
    ConfigError: the folder is in use, or holds something else: another run,
      one that is over, or no run at all.
  """
  workdir = Workdir(root)
  if root.exists() and not root.is_dir():
    raise ConfigError([f'--workdir={root}: is a file, give a folder'])
  found = {path.name for path in root.iterdir()} if root.exists() else set()
  if foreign := sorted(n for n in found if not Workdir.owns(n)):
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
  held = found - {workdir.lock.name}
  if held and overwrite:
    _remove(root, held)
  elif held and (reason := _why_not_go_on(workdir, config)):
    lock.close()
    raise ConfigError(
      [
        f'--workdir={root}: {reason}; give another folder, or --overwrite to '
        'remove that run'
      ]
    )
  return workdir, lock, bool(held) and not overwrite


def _why_not_go_on(workdir: Workdir, config: RunConfig | None) -> str | None:
  """Why the folder's run is not the one to be started; None where it is."""
  if config is None:
    return 'already holds a run'
  if workdir.summary.exists():
    return 'holds a run that is over'
  try:
    theirs = configs.restore(json.loads(workdir.config.read_text()))
  except (OSError, ValueError) as error:
    return f'holds a run of which the configuration is not known ({error})'
  here, there = (
    {**configs.agreement(each), 'name': each.name} for each in (config, theirs)
  )
  differing = configs.differences(here, there)
  return f'holds another run, with {differing}' if differing else None


def _remove(root: pathlib.Path, contents: set[str]) -> None:
  for name in sorted(contents):
    path = root / name
    if path.is_dir() and not path.is_symlink():
      shutil.rmtree(path)
    else:
      path.unlink()
