# SPDX-License-Identifier: Apache-2.0
"""A learner's copy of Θ on the host: rebuilt from updates, verified by CRC."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from diloco.numerics import payload
from diloco.numerics.outer import rebuild
from diloco.runtime.blueprint import Blueprint

Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array.


class Mismatch(Exception):
  """Bytes that arrived do not lead to the announced Θ_p."""


@dataclasses.dataclass(frozen=True)
class Held:
  """One fragment of Θ with its version and CRC."""

  version: int
  theta: Arrays
  crc: int


class HostCopy:
  """One set of arrays and version per fragment; arrays are never written to.

  `update`, `replace` and `adopt` are for one thread; the rest for any.

  Args:
    fragments: Θ_p by fragment.
    versions: their versions; None: all 0.
  """

  def __init__(
    self,
    blueprint: Blueprint,
    fragments: Sequence[Arrays],
    versions: Sequence[int] | None = None,
  ):
    self._blueprint = blueprint
    versions = versions or (0,) * len(fragments)
    self._held = [
      Held(version, theta, self._crc(p, theta))
      for p, (version, theta) in enumerate(zip(versions, fragments))
    ]

  def fragment(self, fragment: int) -> tuple[int, Arrays]:
    """Returns version and Θ_p, consistent with each other."""
    held = self._held[fragment]
    return held.version, held.theta

  def held(self) -> list[Held]:
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
    full, layout = self._blueprint.full, self._blueprint.layout
    thetas = [
      payload.decode(each, pieces, full)
      for each, pieces in zip(data, layout.fragments)
    ]
    self._held = [
      self._proven(p, version, theta, crc)
      for p, (version, theta, crc) in enumerate(zip(versions, thetas, crcs))
    ]

  def take_over(self, held: Sequence[Held]):
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
    pieces = self._blueprint.layout.fragments[fragment]
    rebuilt = rebuild(theta, data, self._blueprint.down, pieces)
    self._keep(fragment, version, rebuilt, crc)

  def replace(self, fragment: int, version: int, data: np.ndarray, crc: int):
    """Replaces a fragment by a full one.

    Raises:
      Mismatch: the CRC is not `crc`.
    """
    pieces = self._blueprint.layout.fragments[fragment]
    whole = payload.decode(data, pieces, self._blueprint.full)
    self._keep(fragment, version, whole, crc)

  def _keep(self, fragment: int, version: int, theta: Arrays, crc: int):
    self._held[fragment] = self._proven(fragment, version, theta, crc)

  def _proven(
    self, fragment: int, version: int, theta: Arrays, crc: int
  ) -> Held:
    found = self._crc(fragment, theta)
    if found != crc:
      raise Mismatch(
        f'CRC {found:08x} of fragment {fragment} version {version}, '
        f'announced {crc:08x}'
      )
    return Held(version, theta, crc)

  def _crc(self, fragment: int, theta: Arrays) -> int:
    return payload.crc(theta, self._blueprint.layout.fragments[fragment])
