# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files of one process among several of a learner.

There Orbax's v1 treats every save as one of all processes, and waits for the
others. Each host saves its own part, and none waits for another: it writes the
same files as Orbax's v0 manager would, under a name that becomes the step's
once all of them are there.
"""

import json
import os
import pathlib
import shutil
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from diloco.checkpoint.orbax_files import UNFINISHED, Volumes, proven, sealed

VOLUMES = 'volumes'
TEXT = 'text/metadata'


class HostFiles:
  """Files of one process among several; see `orbax_files.Files`."""

  def open(self, folder: pathlib.Path, keep: Sequence[Any]) -> '_HostOpened':
    return _HostOpened(folder, keep)

  def read_text(self, path: pathlib.Path) -> str:
    return proven(json.loads((path / TEXT).read_text()))

  def read_volumes(self, path: pathlib.Path) -> Volumes:
    return {x.stem: np.load(x) for x in (path / VOLUMES).glob('*.npy')}


class _HostOpened:
  def __init__(self, folder: pathlib.Path, keep: Sequence[Any]):
    self._folder = folder
    self._keep = keep
    folder.mkdir(parents=True, exist_ok=True)
    for each in folder.glob('*' + UNFINISHED):
      shutil.rmtree(each, ignore_errors=True)

  def save(self, step: int, found: Volumes, text: str) -> None:
    unfinished = self._folder / f'{step}{UNFINISHED}'
    (unfinished / VOLUMES).mkdir(parents=True)
    for name, vector in found.items():
      np.save(unfinished / VOLUMES / f'{name}.npy', vector)
    (unfinished / TEXT).parent.mkdir()
    (unfinished / TEXT).write_text(json.dumps(sealed(text)))
    os.replace(unfinished, self._folder / str(step))
    self._remove_old()

  def close(self) -> None:
    pass

  def _remove_old(self):
    names = (x.name for x in self._folder.iterdir() if x.name.isdecimal())
    there = [SimpleNamespace(step=step) for step in sorted(map(int, names))]
    wanted = [x.should_preserve(there, context=None) for x in self._keep]
    for each, *votes in zip(there, *wanted):
      if not any(votes):
        shutil.rmtree(self._folder / str(each.step))
