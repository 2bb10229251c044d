# SPDX-License-Identifier: Apache-2.0
"""The host's copy of Θ, rebuilt from updates, and the bytes that it stands for.

A learner's only process holds whole pieces, one of several its own slices of
them; both give and take bytes by shard of the syncer. Whole fragments are
verified by their CRC. One of several hosts cannot compute that: it verifies its
own slices, and the CRC, as the syncer announced it, stands for what all hosts
have verified together.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from diloco.numerics import payload
from diloco.numerics.codec import Codec
from diloco.numerics.outer import add
from diloco.protocol import messages
from diloco.run.payload_parts import SliceMap, read_slice_map
from diloco.run.spec import RunSpec

Arrays = Mapping[str, np.ndarray]  # Piece or slice name -> f32 array.
Parts = Sequence[np.ndarray]  # uint8, by shard of the syncer.


class Mismatch(Exception):
  """Bytes that arrived do not lead to the announced Θ_p."""


class VersionGap(Mismatch):
  """The version that an update is to is not here; all of it is asked for."""


@dataclasses.dataclass(frozen=True)
class FragmentReplica:
  """One fragment of Θ with its version and CRC."""

  version: int
  theta: Arrays
  crc: int  # CRC of the whole fragment.


class Replica:
  """One set of arrays and version per fragment; arrays are never written to.

  `update`, `replace` and `adopt` are for one thread; the rest for any.

  Args:
    held: by fragment, what the host needs of it.
    slice_map: how the learner's hosts share fragments.
    host: index of this host.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    held: Sequence[FragmentReplica],
    slice_map: SliceMap,
    host: int = 0,
  ):
    self._run_spec = run_spec
    self._held = list(held)
    self.slice_map = slice_map
    self.host = host

  def fragment(self, fragment: int) -> tuple[int, Arrays]:
    """Returns version and Θ_p, consistent with each other."""
    held = self._held[fragment]
    return held.version, held.theta

  def held(self) -> list[FragmentReplica]:
    """Returns all fragments, each consistent in itself."""
    return list(self._held)

  def crcs(self) -> tuple[int, ...]:
    """Returns the CRC of every whole fragment's bytes."""
    return tuple(held.crc for held in self._held)

  @classmethod
  def empty(cls, run_spec: RunSpec, *of_host) -> 'Replica':
    """Returns the copy of a process that holds nothing yet."""
    nothing = FragmentReplica(0, {}, messages.NO_BYTES)
    return cls(run_spec, [nothing] * len(run_spec.layout.fragments), *of_host)

  def begin(self, held: Sequence[FragmentReplica]):
    """Takes the initial Θ, unless a donor's is here already."""
    if self._held[0].crc == messages.NO_BYTES:
      self._held = list(held)

  def take_over(self, held: Sequence[FragmentReplica]):
    """Takes a donor's copy, which needs no more verification."""
    self._held = list(held)

  def adopt(self, held: Sequence[FragmentReplica]):
    """Takes in a donor's whole copy, or nothing of it.

    The data plane has verified its bytes.

    Raises:
      Mismatch: the CRC of a whole fragment does not match.
    """
    if self.slice_map.whole:
      for p, replica in enumerate(held):
        self._verify(p, replica, ())
    self.take_over(held)

  def update(
    self,
    fragment: int,
    version: int,
    parts: Parts,
    crc: int,
    part_crcs: Sequence[int] = (),
  ):
    """Applies an outer update to the version before, which gives `version`.

    Args:
      parts: bytes by shard of the syncer.
      crc: CRC of the whole Θ_p.
      part_crcs: CRCs of this host's slices of Θ_p, by shard; a learner's only
        host has none.

    Raises:
      Mismatch: the host has another version, or a CRC does not match.
    """
    self.check_base(fragment, version)
    _, theta = self.fragment(fragment)
    sent = self._decode(fragment, parts, self._run_spec.down)
    newer = FragmentReplica(version, add(theta, sent), crc)
    self._verify(fragment, newer, part_crcs)
    self._held[fragment] = newer

  def check_base(self, fragment: int, version: int):
    """Raises `VersionGap` unless the update to `version` fits what is here."""
    held = self._held[fragment].version
    if held != version - 1:
      needed = f'the update needs {version - 1}'
      raise VersionGap(f'version {held} is here, {needed}')

  def replace(
    self,
    fragment: int,
    version: int,
    parts: Parts,
    crc: int,
    part_crcs: Sequence[int] = (),
  ):
    """Replaces a fragment by a full one; arguments as for `update`.

    Raises:
      Mismatch: a CRC does not match.
    """
    theta = self._decode(fragment, parts, self._run_spec.full)
    newer = FragmentReplica(version, theta, crc)
    self._verify(fragment, newer, part_crcs)
    self._held[fragment] = newer

  def _decode(
    self, fragment: int, parts: Parts, codec: Codec
  ) -> dict[str, np.ndarray]:
    decode = payload.decode if self.slice_map.whole else payload.decode_cut
    arrays = {}
    for shard, data in enumerate(parts):
      boxes = self.slice_map.needed(fragment, self.host, shard)
      try:
        arrays |= decode(data, boxes, codec)
      except ValueError as error:
        raise Mismatch(str(error)) from error
    return arrays

  def _verify(
    self, fragment: int, held: FragmentReplica, part_crcs: Sequence[int]
  ):
    pieces = self._run_spec.layout.fragments[fragment]
    expected = [('', pieces, held.crc)]
    if not self.slice_map.whole:
      needed = self.slice_map.needed
      expected = [
        (f'part {shard} of ', needed(fragment, self.host, shard), announced)
        for shard, announced in enumerate(part_crcs)
      ]
    for which, boxes, announced in expected:
      actual = payload.crc(held.theta, boxes) if boxes else 0
      if actual != announced:
        raise Mismatch(
          f'CRC {actual:08x} of {which}fragment {fragment} version '
          f'{held.version}, announced {announced:08x}'
        )


def whole_replica(
  run_spec: RunSpec,
  fragments: Sequence[Arrays],
  versions: Sequence[int] | None = None,
) -> Replica:
  """Returns the copy of a learner's only host.

  Args:
    fragments: Θ_p by fragment.
    versions: their versions; None: all 0.
  """
  layout = run_spec.layout.fragments
  versions = versions or (0,) * len(layout)
  return Replica(
    run_spec,
    [
      FragmentReplica(version, theta, payload.crc(theta, pieces))
      for version, theta, pieces in zip(versions, fragments, layout)
    ],
    read_slice_map(run_spec, ''),
  )


@dataclasses.dataclass(frozen=True)
class ArrivedFragment:
  """A fragment of Θ at one version, on the host and on the devices.

  One of a donor's has no `device` until it is taken: else all of Θ would be
  there twice.
  """

  fragment: int
  held: FragmentReplica
  device: Mapping[str, jax.Array] | None
