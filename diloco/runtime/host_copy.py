# SPDX-License-Identifier: Apache-2.0
"""A learner's copy of Θ on the host: rebuilt from updates, proven by CRC."""

from collections.abc import Mapping

import numpy as np

from diloco.numerics import payload
from diloco.numerics.outer import rebuild
from diloco.runtime.blueprint import Blueprint

Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array.


class Mismatch(Exception):
  """What came does not lead to the announced bytes of Θ_p."""


class HostCopy:
  """One array set and version per fragment; arrays are never written to.

  `update` and `replace` are for one thread; `fragment` may be called from any.
  """

  def __init__(self, blueprint: Blueprint, fragments: list[Arrays]):
    self._blueprint = blueprint
    self._held = [(0, theta) for theta in fragments]

  def fragment(self, fragment: int) -> tuple[int, Arrays]:
    """Version and Θ_p, belonging together."""
    return self._held[fragment]

  def crcs(self) -> tuple[int, ...]:
    """Of the bytes of every fragment."""
    layout = self._blueprint.layout
    return tuple(
      payload.crc(theta, pieces)
      for (_, theta), pieces in zip(self._held, layout.fragments)
    )

  def update(self, fragment: int, version: int, data: np.ndarray, crc: int):
    """Takes in an outer update: Θ_p at `version` from that before.

    Raises:
      Mismatch: the host has another version, or the CRC is not `crc`.
    """
    held, theta = self._held[fragment]
    if held != version - 1:
      raise Mismatch(f'version {held} is here, the update needs {version - 1}')
    pieces = self._blueprint.layout.fragments[fragment]
    rebuilt = rebuild(theta, data, self._blueprint.down, pieces)
    self._keep(fragment, version, rebuilt, crc)

  def replace(self, fragment: int, version: int, data: np.ndarray, crc: int):
    """Takes in a full fragment.

    Raises:
      Mismatch: the CRC is not `crc`.
    """
    pieces = self._blueprint.layout.fragments[fragment]
    whole = payload.decode(data, pieces, self._blueprint.full)
    self._keep(fragment, version, whole, crc)

  def _keep(self, fragment: int, version: int, theta: Arrays, crc: int):
    found = payload.crc(theta, self._blueprint.layout.fragments[fragment])
    if found != crc:
      raise Mismatch(
        f'CRC {found:08x} of fragment {fragment} version {version}, '
        f'announced {crc:08x}'
      )
    self._held[fragment] = (version, theta)
