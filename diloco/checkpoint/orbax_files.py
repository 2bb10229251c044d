# SPDX-License-Identifier: Apache-2.0
"""Reads and writes one checkpoint by Orbax's v1: a tree of arrays and a text.

Orbax takes about a third of a second of CPU to import. So that happens with the
first checkpoint that is read, or on the thread that writes the first one: most
processes begin without a checkpoint. While the dynamic linker maps
TensorStore's 65 MB it holds the interpreter, and no thread runs: with pages
that came from a slow disk that took 11 s. So `orbax` first reads the file
through, during which all other threads go on.
"""

import asyncio
import functools
import importlib.util
import json
import pathlib
import threading
import zlib
from collections.abc import Mapping

import jax

from diloco.checkpoint.arrays import BrokenRecord

# Held by whatever saves or loads with Orbax, which numbers its operations for
# the whole process and signals to the newest that a folder is there: a save
# beside another save or a load, of whatever folders, then fails, or waits for
# its own signal for minutes.
OPERATING = threading.Lock()

CHUNK_BYTES = 1 << 20
SAVE_S_MAX = 600  # Then a host that lives gives up one that writes too slowly.
STATE = 'state'  # The item that Orbax looks for first.
CRCS = 'crcs'


@functools.cache
def orbax():
  """Returns Orbax's v1, imported while other threads run."""
  read_shared_objects('tensorstore')
  from orbax.checkpoint import v1
  from orbax.checkpoint.experimental.v1._src.saving import execution

  # It compares paths by collectives on the devices. A save is not of the thread
  # that dispatches steps: between these, hosts would run it at different
  # places, and wait for each other for ever.
  assert callable(execution._check_directory_consistency)
  execution._check_directory_consistency = lambda path: None
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


def save(path: pathlib.Path, tree: Mapping, text: str, crcs: str) -> None:
  """Writes one checkpoint atomically, together with all hosts of a learner.

  Every process of the JAX process group has to call it, for the same saves in
  the same order: Orbax lets them wait for each other. If one of them dies, it
  raises in the others, or JAX ends them.

  Args:
    path: of the checkpoint; all processes see the same folder there.
    tree: nested dicts of arrays. Of each jax array a process writes the shards
      that are the first with their values; numpy arrays are written by the
      first process. None may change meanwhile.
    text: of the first process; it becomes `custom_metadata`, with a CRC.
    crcs: this process's text; see `read_crcs`.
  """
  with OPERATING, _context():
    orbax().save_checkpointables(
      path, {STATE: tree, CRCS: _Crcs(crcs)}, custom_metadata=sealed(text)
    )


def load(path: pathlib.Path, likes: Mapping) -> dict:
  """Reads arrays of one checkpoint, together with all hosts of a learner.

  Args:
    likes: the saved tree. Where a leaf is `np.ndarray` the result is one; where
      it has shape, dtype and sharding, a jax array of that, of which each
      process reads its own shards, however they were cut when they were saved.
  """
  with OPERATING:
    return orbax().load(path, likes, checkpointable_name=STATE)


def read_text(path: pathlib.Path) -> str:
  """Returns the text of one checkpoint; `BrokenRecord` if it is damaged.

  It does without Orbax, which takes longer to import than this to read.
  """
  metadata = json.loads((path / '_CHECKPOINT_METADATA').read_text())
  return proven(metadata['custom_metadata'])


def read_crcs(path: pathlib.Path) -> list[str]:
  """Returns the `crcs` of every process that took part in the save."""
  return [
    proven(json.loads(file.read_text()))
    for file in sorted((path / CRCS).iterdir())
  ]


def is_first() -> bool:
  """True in one process of the JAX process group."""
  return jax.process_index() == 0


@functools.cache
def _context():
  context = orbax().Context()
  saving = context.array.saving
  saving.use_compression = False  # Nothing to gain in f32.
  saving.enable_post_merge_validation = False
  saving.use_replica_parallel = False  # A shard is written as it is.
  saving.enable_pinned_host_transfer = False  # It is on the host already.
  context.asynchronous.timeout_secs = SAVE_S_MAX
  context.memory.deepcopy_host_arrays = False  # They are not written to.
  # Then `_Crcs.save` finds its folder, and has written to it before any process
  # waits for the others' arrays, and so before the checkpoint is complete.
  context.asynchronous.create_directories_asynchronously = False
  return context


class _Crcs:
  """A text of each process, as an item of Orbax's checkpoint."""

  def __init__(self, text: str):
    self._text = text

  async def save(self, directory):
    path = directory.path / f'{jax.process_index()}.json'
    path.write_text(json.dumps(sealed(self._text)))
    return asyncio.sleep(0)  # Nothing is left to be awaited.

  async def load(self, directory):
    raise NotImplementedError  # See `read_crcs`.


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
