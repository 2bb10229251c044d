# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files of one process among several of a learner.

There Orbax's v1 treats every save as one of all processes, and waits for the
others; the manager of v0 can be told that it writes alone. Each host saves its
own part, and none waits for another.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as v0

from diloco.checkpoint.orbax_files import Opened, Volumes, proven, sealed


class _Vectors(v0.CheckpointHandler):
  """Writes vectors as .npy files: Orbax itself writes only those of process
  0.
  """

  def save(self, directory, args: '_SaveVectors'):
    for name, vector in args.vectors.items():
      with (directory / f'{name}.npy').open('wb') as file:
        np.save(file, vector)

  def restore(self, directory, args: '_RestoreVectors | None' = None):
    found = {}
    for path in directory.glob('*.npy'):
      with path.open('rb') as file:
        found[path.stem] = np.load(file)
    return found


@v0.args.register_with_handler(_Vectors, for_save=True)
@dataclasses.dataclass
class _SaveVectors(v0.args.CheckpointArgs):
  vectors: Volumes


@v0.args.register_with_handler(_Vectors, for_restore=True)
@dataclasses.dataclass
class _RestoreVectors(v0.args.CheckpointArgs):
  pass


class HostFiles:
  """Files of one process among several.

  Args:
    process: its index in the JAX process group.
  """

  def __init__(self, process: int):
    self._alone = v0.options.MultiprocessingOptions(
      primary_host=process,
      active_processes={process},
      barrier_sync_key_prefix=f'process{process}',
    )

  def open(self, folder: pathlib.Path, keep: Sequence[Any]) -> Opened:
    folder.mkdir(parents=True, exist_ok=True)
    return _HostOpened(self._manager(folder, keep))

  def read_text(self, path: pathlib.Path) -> str:
    return proven(self._read(path, 'text', v0.args.JsonRestore()))

  def read_volumes(self, path: pathlib.Path) -> Volumes:
    return self._read(path, 'volumes', _RestoreVectors())

  def _read(self, path: pathlib.Path, name: str, arguments):
    manager = self._manager(path.parent, ())
    try:
      found = manager.restore(
        int(path.name), args=v0.args.Composite(**{name: arguments})
      )
    finally:
      manager.close()
    return found[name]

  def _manager(self, folder: pathlib.Path, keep: Sequence[Any]):
    options = v0.CheckpointManagerOptions(
      create=False,
      cleanup_tmp_directories=bool(keep),
      # It runs on the caller's thread already.
      enable_async_checkpointing=False,
      multiprocessing_options=self._alone,
      preservation_policy=(
        v0.checkpoint_managers.AnyPreservationPolicy(keep) if keep else None
      ),
    )
    handlers = {
      'volumes': _Vectors(),
      'text': v0.JsonCheckpointHandler(multiprocessing_options=self._alone),
    }
    return v0.CheckpointManager(folder, options=options, item_handlers=handlers)


class _HostOpened:
  def __init__(self, manager: v0.CheckpointManager):
    self._manager = manager

  def save(self, step: int, found: Volumes, text: str) -> None:
    self._manager.save(
      step,
      args=v0.args.Composite(
        volumes=_SaveVectors(found),
        text=v0.args.JsonSave(sealed(text)),
      ),
      force=True,
    )

  def close(self) -> None:
    self._manager.close()
