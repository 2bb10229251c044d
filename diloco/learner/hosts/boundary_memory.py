# SPDX-License-Identifier: Apache-2.0
"""A host's part of a boundary, in memory that outlives its process.

A learner of several slices loses one, and all of its processes with it: the
world of `jax.distributed` dies as one. What is left of the boundary lies in the
memory of the surviving hosts. Each writes its part to a file of a file system
in memory, from whichever thread sees the end first, as the main one may wait in
a collective for ever; the processes that take over read it from there.

A file is one host's part of one boundary: a header of JSON, its length before
it, then the bytes of the boxes, each with a CRC in the header. It is written
beside and renamed: there is always a whole one.
"""

import contextlib
import dataclasses
import json
import mmap
import os
import pathlib
import threading
import time
from collections.abc import Mapping
from concurrent import futures
from typing import Any

import jax
import numpy as np

from diloco.checkpoint.arrays import BrokenRecord, boxes_of, named
from diloco.numerics import boxes, native
from diloco.numerics.boxes import Box
from diloco.protocol.host_messages import WANTED, alive_file

ALIVE_EVERY_S = 1.0
LENGTH = 8  # Bytes of the header's length, little-endian.
Boxes = list[tuple[Box, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Boundary:
  """One host's part of all that belongs to a boundary.

  Attributes:
    step: own steps made.
    params: θ, and `inner_state`: pytrees of arrays on the devices.
    bases: fragment -> box name -> Θ_p as last taken in, f32 on the host.
    progress: JSON, as of `restore.progress_of`.
  """

  step: int
  params: Any
  inner_state: Any
  bases: Mapping[int, Mapping[str, np.ndarray]]
  progress: str

  @property
  def readable(self) -> bool:
    """Whether the devices have computed all of it, and still have it."""
    return all(
      not x.is_deleted() and x.is_ready()
      for x in jax.tree.leaves((self.params, self.inner_state))
    )


@dataclasses.dataclass(frozen=True)
class StoredBoundary:
  """A `Boundary` as it was read from memory; arrays as boxes by name."""

  step: int
  progress: str
  arrays: dict[str, Boxes]  # As `named` has them, of 'params' and 'optimizer'.
  bases: dict[int, dict[str, np.ndarray]]

  def read(self, name: str, box: Box) -> np.ndarray | None:
    """Returns a box of an array; None: it is not all here."""
    held = self.arrays[name]
    return boxes.read(held, box, held[0][1].dtype)


class BoundaryMemory:
  """The boundaries of one host's process; for its loop, and one other thread.

  Args:
    folder: in memory, of this learner on this machine.
    slice_id: of this process's slice, from 0.
    part: number of this host within the slice, from 0.
    identity: of the learner and run; another's file is not read.

  Attributes:
    path: the file of this host.
    identity: see above.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    slice_id: int,
    part: int,
    identity: Mapping[str, str],
  ):
    self.path = folder / f'slice-{slice_id}.host-{part}'
    self._wanted = folder / WANTED
    self._alive = folder / alive_file(slice_id, part)
    self.identity = dict(identity)
    self._lock = threading.Lock()
    self._notes: list[Boundary] = []  # The last two, the newer one last.
    self._reading: futures.Future[StoredBoundary | None] | None = None
    folder.mkdir(parents=True, exist_ok=True)

  @property
  def wants_others(self) -> bool:
    """Whether another slice is to take part, from the next boundary on."""
    return self._wanted.exists()

  def note(self, boundary: Boundary):
    """Keeps references to a boundary, whose arrays may not be ready yet."""
    with self._lock:
      self._notes = [*self._notes[-1:], boundary]

  def write(self) -> int | None:
    """Writes the newest boundary that can be read; returns its step, if any."""
    with self._lock:
      for boundary in reversed(self._notes):
        if boundary.readable:
          self._write(boundary)
          return boundary.step
    return None

  def stay_alive(self):
    """Touches a file from now on, by which the launcher sees that this host
    does not hang.
    """

    def touch():
      with contextlib.suppress(FileNotFoundError):  # The launcher has ended.
        while True:
          self._alive.touch()
          time.sleep(ALIVE_EVERY_S)

    threading.Thread(target=touch, name='alive', daemon=True).start()

  def read_ahead(self):
    """Begins on a thread what `read` returns; the hosts meet meanwhile."""
    pool = futures.ThreadPoolExecutor(1)
    self._reading = pool.submit(self._read)
    pool.shutdown(wait=False)

  def read(self) -> StoredBoundary | None:
    """Returns the boundary that the last process of this host has written.

    Raises:
      BrokenRecord: it is damaged.
    """
    reading, self._reading = self._reading, None
    return self._read() if reading is None else reading.result()

  def _read(self) -> StoredBoundary | None:
    try:
      with self.path.open('rb') as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, ValueError):  # An empty one can't be mapped.
      return None
    first = LENGTH + int.from_bytes(mapped[:LENGTH], 'little')
    header = json.loads(mapped[LENGTH:first])
    if header['identity'] != self.identity:
      return None  # Of another run that had this name.
    arrays, bases = {}, {}
    for name, stored in header['arrays'].items():
      found = []
      for box, dtype, shape, offset, crc in stored:
        count = int(np.prod(shape))
        start = first + offset
        # A copy: what is made of a mapped file would be an alias of it.
        x = np.frombuffer(mapped, dtype, count, start).reshape(shape).copy()
        if native.crc32(_bytes(x)) != crc:
          raise BrokenRecord(f'{self.path}: {name} {box} is damaged')
        found.append((tuple(map(tuple, box)), x))
      group, _, rest = name.partition('/')
      if group == 'bases':
        fragment, _, box_name = rest.partition('/')
        bases.setdefault(int(fragment), {})[box_name] = found[0][1]
      else:
        arrays[name] = found
    return StoredBoundary(header['step'], header['progress'], arrays, bases)

  def _write(self, boundary: Boundary):
    tree = {'params': boundary.params, 'optimizer': boundary.inner_state}
    parts: list[np.ndarray] = []
    arrays, offset = {}, 0

    def add(name: str, box: Box, x: np.ndarray):
      nonlocal offset
      x = np.asarray(x, order='C')  # A scalar stays one.
      crc = native.crc32(_bytes(x))
      arrays.setdefault(name, []).append(
        (box, x.dtype.name, x.shape, offset, crc)
      )
      parts.append(x)
      offset += x.nbytes

    for name, leaf in named(tree).items():
      seen = set()
      for index, data, _ in boxes_of(leaf):
        box = boxes.at(index, leaf.shape)
        if box not in seen:
          seen.add(box)
          add(name, box, np.asarray(data))
    for p, pieces in boundary.bases.items():
      for name, x in pieces.items():
        add(f'bases/{p}/{name}', (), x)
    header = json.dumps(
      {
        'step': boundary.step,
        'progress': boundary.progress,
        'identity': self.identity,
        'arrays': arrays,
      }
    ).encode()
    new = self.path.with_name(f'{self.path.name}.new')
    with new.open('wb') as file:
      file.write(len(header).to_bytes(LENGTH, 'little'))
      file.write(header)
      for x in parts:
        file.write(_bytes(x))
    os.replace(new, self.path)


def _bytes(x: np.ndarray) -> np.ndarray:
  return x.reshape(-1).view(np.uint8)
