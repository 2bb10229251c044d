# SPDX-License-Identifier: Apache-2.0
"""The host's copy of Θ, whole or in part, rebuilt from updates."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from diloco.numerics import payload
from diloco.numerics.outer import add, rebuild
from diloco.run.host_slices import SliceMap
from diloco.run.spec import RunSpec

Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array.


class Mismatch(Exception):
  """Bytes that arrived do not lead to the announced Θ_p."""


@dataclasses.dataclass(frozen=True)
class FragmentReplica:
  """One fragment of Θ with its version and CRC."""

  version: int
  theta: Arrays
  crc: int


class WholeReplica:
  """One set of arrays and version per fragment; arrays are never written to.

  `update`, `replace` and `adopt` are for one thread; the rest for any.

  Args:
    fragments: Θ_p by fragment.
    versions: their versions; None: all 0.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    fragments: Sequence[Arrays],
    versions: Sequence[int] | None = None,
  ):
    self._run_spec = run_spec
    versions = versions or (0,) * len(fragments)
    self._held = [
      FragmentReplica(version, theta, self._crc(p, theta))
      for p, (version, theta) in enumerate(zip(versions, fragments))
    ]

  def fragment(self, fragment: int) -> tuple[int, Arrays]:
    """Returns version and Θ_p, consistent with each other."""
    held = self._held[fragment]
    return held.version, held.theta

  def held(self) -> list[FragmentReplica]:
    """Returns all fragments, each consistent in itself."""
    return list(self._held)

  def crcs(self) -> tuple[int, ...]:
    """Returns the CRC of every fragment's bytes."""
    return tuple(held.crc for held in self._held)

  def adopt(
    self,
    versions: Sequence[int],
    data: Sequence[np.ndarray],
    crcs: Sequence[int],
  ):
    """Takes in a donor's whole copy, or nothing of it.

    Args:
      versions: by fragment.
      data: bytes of Θ_p in f32, by fragment.
      crcs: their CRCs.

    Raises:
      Mismatch: a CRC does not match.
    """
    full, layout = self._run_spec.full, self._run_spec.layout
    thetas = [
      payload.decode(each, pieces, full)
      for each, pieces in zip(data, layout.fragments)
    ]
    self._held = [
      self._proven(p, version, theta, crc)
      for p, (version, theta, crc) in enumerate(zip(versions, thetas, crcs))
    ]

  def take_over(self, held: Sequence[FragmentReplica]):
    """Takes a donor's copy from the same process; nothing needs to be
    verified.
    """
    self._held = list(held)

  def update(self, fragment: int, version: int, data: np.ndarray, crc: int):
    """Applies an outer update to the version before, which gives `version`.

    Raises:
      Mismatch: the host has another version, or the CRC is not `crc`.
    """
    held, theta = self.fragment(fragment)
    if held != version - 1:
      raise Mismatch(f'version {held} is here, the update needs {version - 1}')
    pieces = self._run_spec.layout.fragments[fragment]
    rebuilt = rebuild(theta, data, self._run_spec.down, pieces)
    self._keep(fragment, version, rebuilt, crc)

  def replace(self, fragment: int, version: int, data: np.ndarray, crc: int):
    """Replaces a fragment by a full one.

    Raises:
      Mismatch: the CRC is not `crc`.
    """
    pieces = self._run_spec.layout.fragments[fragment]
    whole = payload.decode(data, pieces, self._run_spec.full)
    self._keep(fragment, version, whole, crc)

  def _keep(self, fragment: int, version: int, theta: Arrays, crc: int):
    self._held[fragment] = self._proven(fragment, version, theta, crc)

  def _proven(
    self, fragment: int, version: int, theta: Arrays, crc: int
  ) -> FragmentReplica:
    found = self._crc(fragment, theta)
    if found != crc:
      raise Mismatch(
        f'CRC {found:08x} of fragment {fragment} version {version}, '
        f'announced {crc:08x}'
      )
    return FragmentReplica(version, theta, crc)

  def _crc(self, fragment: int, theta: Arrays) -> int:
    return payload.crc(theta, self._run_spec.layout.fragments[fragment])


# One host's part of a learner's copy of Θ, if the learner has several hosts.
#
# It corresponds to `host_copy.WholeReplica` of a learner of one host. A host
# verifies its own slices; the CRC of the whole fragment, which it cannot
# compute, is taken from the syncer, and stands for what all hosts have verified
# together.


class SlicedReplica:
  """One set of slices and version per fragment; arrays are never written to.

  Args:
    cuts: how the learner's hosts share fragments.
    host: index of this host.
    held: by fragment, the slices that the host needs.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    slice_map: SliceMap,
    host: int,
    held: Sequence[FragmentReplica],
  ):
    self._run_spec = run_spec
    self.slice_map = slice_map
    self.host = host
    self._held = list(held)

  def held(self) -> list[FragmentReplica]:
    """Returns all fragments, each consistent in itself."""
    return list(self._held)

  def crcs(self) -> tuple[int, ...]:
    """Returns the CRC of every whole fragment's bytes."""
    return tuple(held.crc for held in self._held)

  def take_over(self, held: Sequence[FragmentReplica]):
    """Takes a donor's whole part, whose bytes the data plane has verified."""
    self._held = list(held)

  def update(
    self,
    fragment: int,
    version: int,
    parts: Sequence[np.ndarray],
    crc: int,
    part_crcs: Sequence[int],
  ):
    """Applies an outer update to the version before, which gives `version`.

    Args:
      parts: bytes by shard of the syncer.
      crc: CRC of the whole Θ_p.
      part_crcs: CRCs of this host's slices of Θ_p, by shard.

    Raises:
      Mismatch: the host has another version, or a CRC does not match.
    """
    held = self._held[fragment]
    if held.version != version - 1:
      raise Mismatch(
        f'version {held.version} is here, the update needs {version - 1}'
      )
    sent = self._decode(fragment, parts, self._run_spec.down)
    theta = add(held.theta, sent)
    self._keep(fragment, version, theta, crc, part_crcs)

  def replace(
    self,
    fragment: int,
    version: int,
    parts: Sequence[np.ndarray],
    crc: int,
    part_crcs: Sequence[int],
  ):
    """Replaces this host's part of a fragment; arguments as for `update`."""
    theta = self._decode(fragment, parts, self._run_spec.full)
    self._keep(fragment, version, theta, crc, part_crcs)

  def _decode(self, fragment: int, parts, codec) -> dict[str, np.ndarray]:
    found = {}
    for shard, data in enumerate(parts):
      boxes = self.slice_map.needed(fragment, self.host, shard)
      try:
        found |= payload.decode_cut(data, boxes, codec)
      except ValueError as error:
        raise Mismatch(str(error)) from error
    return found

  def _keep(
    self,
    fragment: int,
    version: int,
    theta: Arrays,
    crc: int,
    part_crcs: Sequence[int],
  ):
    for shard, announced in enumerate(part_crcs):
      boxes = self.slice_map.needed(fragment, self.host, shard)
      found = payload.crc(theta, boxes) if boxes else 0
      if found != announced:
        raise Mismatch(
          f'CRC {found:08x} of part {shard} of fragment {fragment} version '
          f'{version}, announced {announced:08x}'
        )
    self._held[fragment] = FragmentReplica(version, theta, crc)
