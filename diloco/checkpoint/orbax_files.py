# SPDX-License-Identifier: Apache-2.0
"""Reads and writes volumes and a text in a folder of Orbax's.

There are two ways, which the caller chooses: `SOLE`, by Orbax's v1, for a
process that is alone in its JAX process group; and `host_files.HostFiles`, for
one of several.

Orbax takes about a third of a second of CPU to import. So that happens with the
first checkpoint that is read, or on the thread that writes the first one: most
processes begin without a checkpoint. While the dynamic linker maps
TensorStore's 65 MB it holds the interpreter, and no thread runs: with pages
that came from a slow disk that took 11 s. So `orbax` first reads the file
through, during which all other threads go on.
"""

import functools
import importlib.util
import pathlib
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from diloco.checkpoint.arrays import BrokenRecord

Volumes = Mapping[str, np.ndarray]  # Number -> uint8 vector.

# Held by whatever saves or loads with Orbax, which numbers its operations for
# the whole process and signals to the newest that a folder is there: a save
# beside another save or a load, of whatever folders, then fails, or waits for
# its own signal for minutes.
OPERATING = threading.Lock()

CHUNK_BYTES = 1 << 20
UNFINISHED = '.orbax-checkpoint-tmp'  # Of the name of what is being written.


@functools.cache
def orbax():
  """Returns Orbax's v1, imported while other threads run."""
  read_shared_objects('tensorstore')
  from orbax.checkpoint import v1

  return v1


def read_shared_objects(package: str) -> int:
  """Brings a package's shared objects into the page cache; imports nothing.

  Returns:
    The number of bytes read; 0 where there is no such package.
  """
  spec = importlib.util.find_spec(package)
  total, chunk = 0, bytearray(CHUNK_BYTES)
  for folder in spec.submodule_search_locations or () if spec else ():
    for path in sorted(pathlib.Path(folder).glob('*.so')):
      with path.open('rb', buffering=0) as file:
        while count := file.readinto(chunk):  # Without the interpreter's lock.
          total += count
  return total


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
    found = orbax().checkpointables_metadata(path).custom_metadata
    return proven(found)

  def read_volumes(self, path: pathlib.Path) -> Volumes:
    with OPERATING:
      return orbax().load(path, checkpointable_name='volumes')


SOLE = _Sole()


class _SoleOpened:
  def __init__(self, folder: pathlib.Path, keep: Sequence[Any]):
    v1 = orbax()
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
      custom_metadata=sealed(text),
      force=True,  # Whether to save was decided by the caller.
    )

  def close(self) -> None:
    self._checkpointer.close()


def sealed(text: str) -> dict:
  """Returns what `proven` takes: the text with its CRC."""
  return {'text': text, 'crc': zlib.crc32(text.encode())}


def proven(found: Mapping | None) -> str:
  """Returns the text; raises BrokenRecord if it is missing or damaged."""
  if not found:
    raise BrokenRecord('it has no metadata')
  text = str(found['text'])
  if zlib.crc32(text.encode()) != found['crc']:
    raise BrokenRecord('the CRC of its metadata is another')
  return text
