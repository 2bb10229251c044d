# SPDX-License-Identifier: Apache-2.0
"""Reads and writes volumes and a text in a folder of Orbax's.

There are two ways, which the caller chooses: `SOLE`, by Orbax's v1, for a
process that is alone in its JAX process group; and `HostFiles`, for one of
several. There v1 treats every save as one of all processes, and waits for the
others; the manager of v0 can be told that it writes alone. Each host saves its
own part, and none waits for another.
"""

import dataclasses
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import orbax.checkpoint as v0
from orbax.checkpoint import v1

from diloco.checkpoint.arrays import BrokenRecord

Volumes = Mapping[str, np.ndarray]  # Number -> uint8 vector.


class Opened(Protocol):
  """A folder that is open for writing."""

  def save(self, step: int, found: Volumes, text: str) -> None:
    """Writes one checkpoint atomically; removes old ones."""

  def close(self) -> None:
    """Closes the folder; nothing is written any more."""


class Files(Protocol):
  """Writes and reads checkpoints; one protocol, two implementations."""

  def open(self, folder: pathlib.Path, keep: Sequence[Any]) -> Opened:
    """Opens a folder for writing.

    Args:
      folder: the folder of the checkpoints.
      keep: Orbax's preservation policies; a checkpoint stays if one wants it.
    """

  def read_text(self, path: pathlib.Path) -> str:
    """Returns the text of one checkpoint; `BrokenRecord` if it is damaged."""

  def read_volumes(self, path: pathlib.Path) -> Volumes:
    """Returns the volumes of one checkpoint."""


class _Sole:
  def open(self, folder: pathlib.Path, keep: Sequence[Any]) -> Opened:
    return _SoleOpened(folder, keep)

  def read_text(self, path: pathlib.Path) -> str:
    found = v1.checkpointables_metadata(path).custom_metadata
    return _proven(found)

  def read_volumes(self, path: pathlib.Path) -> Volumes:
    return v1.load(path, checkpointable_name='volumes')


SOLE = _Sole()


class _SoleOpened:
  def __init__(self, folder: pathlib.Path, keep: Sequence[Any]):
    context = v1.Context()
    context.array.saving.use_compression = False  # Nothing to gain in f32.
    context.array.saving.enable_post_merge_validation = False
    context.memory.deepcopy_host_arrays = False  # They are not written to.
    policies = v1.training.preservation_policies
    self._checkpointer = v1.training.Checkpointer(
      folder,
      context=context,
      preservation_policy=policies.AnyPreservationPolicy(keep),
      cleanup_tmp_directories=True,
    )

  def save(self, step: int, found: Volumes, text: str) -> None:
    self._checkpointer.save_checkpointables(
      step,
      {'volumes': dict(found)},
      custom_metadata=_sealed(text),
      force=True,  # Whether to save was decided by the caller.
    )

  def close(self) -> None:
    self._checkpointer.close()


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
    return _proven(self._read(path, 'text', v0.args.JsonRestore()))

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
        text=v0.args.JsonSave(_sealed(text)),
      ),
      force=True,
    )

  def close(self) -> None:
    self._manager.close()


def _sealed(text: str) -> dict:
  return {'text': text, 'crc': zlib.crc32(text.encode())}


def _proven(found: Mapping | None) -> str:
  if not found:
    raise BrokenRecord('it has no metadata')
  text = str(found['text'])
  if zlib.crc32(text.encode()) != found['crc']:
    raise BrokenRecord('the CRC of its metadata is another')
  return text
