# SPDX-License-Identifier: Apache-2.0
"""Reads and writes volumes and a text in a folder of Orbax's.

There are two ways, which the caller chooses: `SoleFiles`, by Orbax's v1, for a
process that is alone in its JAX process group; and `HostFiles`, for one of
several.

Orbax takes about a third of a second of CPU to import. So that happens with the
first checkpoint that is read, or on the thread that writes the first one: most
processes begin without a checkpoint. While the dynamic linker maps
TensorStore's 65 MB it holds the interpreter, and no thread runs: with pages
that came from a slow disk that took 11 s. So `orbax` first reads the file
through, during which all other threads go on.
"""

import functools
import importlib.util
import json
import os
import pathlib
import shutil
import threading
import zlib
from collections.abc import Mapping

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
TEXT = 'text/metadata'  # Of a host's checkpoint.


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


class SoleFiles:
  """Checkpoints of a process that is alone in its JAX process group.

  Args:
    folder: of the checkpoints, to be written to; one instance at a time.
    keep_latest: number of newest checkpoints that stay.
  """

  def __init__(self, folder: pathlib.Path, keep_latest: int):
    v1 = orbax()
    context = v1.Context()
    context.array.saving.use_compression = False  # Nothing to gain in f32.
    context.array.saving.enable_post_merge_validation = False
    context.memory.deepcopy_host_arrays = False  # They are not written to.
    self._checkpointer = v1.training.Checkpointer(
      folder,
      context=context,
      preservation_policy=v1.training.preservation_policies.LatestN(
        keep_latest
      ),
      cleanup_tmp_directories=True,
    )

  def save(self, step: int, volumes: Volumes, text: str) -> None:
    """Writes one checkpoint atomically; removes old ones."""
    self._checkpointer.save_checkpointables(
      step,
      {'volumes': dict(volumes)},
      custom_metadata=sealed(text),
      force=True,  # Whether to save was decided by the caller.
    )

  def close(self) -> None:
    """Closes the folder; nothing is written any more."""
    self._checkpointer.close()

  @staticmethod
  def read_text(path: pathlib.Path) -> str:
    """Returns the text of one checkpoint; `BrokenRecord` if it is damaged."""
    return proven(orbax().checkpointables_metadata(path).custom_metadata)

  @staticmethod
  def read_volumes(path: pathlib.Path) -> Volumes:
    """Returns the volumes of one checkpoint."""
    with OPERATING:
      return orbax().load(path, checkpointable_name='volumes')


class HostFiles:
  """The same of one process among several of a learner.

  There Orbax's v1 treats every save as one of all processes, and waits for the
  others. Each host saves its own part, and none waits for another: it writes
  the same files as Orbax's v0 manager would, under a name that becomes the
  step's once all of them are there.
  """

  def __init__(self, folder: pathlib.Path, keep_latest: int):
    self._folder = folder
    self._keep_latest = keep_latest
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob('*' + UNFINISHED):
      shutil.rmtree(path, ignore_errors=True)

  def save(self, step: int, volumes: Volumes, text: str) -> None:
    unfinished = self._folder / f'{step}{UNFINISHED}'
    (unfinished / 'volumes').mkdir(parents=True)
    for name, vector in volumes.items():
      np.save(unfinished / 'volumes' / f'{name}.npy', vector)
    (unfinished / TEXT).parent.mkdir()
    (unfinished / TEXT).write_text(json.dumps(sealed(text)))
    os.replace(unfinished, self._folder / str(step))
    names = (x.name for x in self._folder.iterdir() if x.name.isdecimal())
    for old in sorted(map(int, names))[: -self._keep_latest]:
      shutil.rmtree(self._folder / str(old))

  def close(self) -> None:
    pass

  @staticmethod
  def read_text(path: pathlib.Path) -> str:
    return proven(json.loads((path / TEXT).read_text()))

  @staticmethod
  def read_volumes(path: pathlib.Path) -> Volumes:
    return {x.stem: np.load(x) for x in (path / 'volumes').glob('*.npy')}


Files = type[SoleFiles] | type[HostFiles]


def sealed(text: str) -> dict:
  """Returns what `proven` takes: the text with its CRC."""
  return {'text': text, 'crc': zlib.crc32(text.encode())}


def proven(metadata: Mapping | None) -> str:
  """Returns the text; raises BrokenRecord if it is missing or damaged."""
  if not metadata:
    raise BrokenRecord('it has no metadata')
  text = str(metadata['text'])
  if zlib.crc32(text.encode()) != metadata['crc']:
    raise BrokenRecord('the CRC of its metadata is another')
  return text
