# SPDX-License-Identifier: Apache-2.0
"""Records of a lab process's state, for a newcomer or a checkpoint."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from diloco.runtime.host_copy import Held

Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array.


@dataclasses.dataclass(frozen=True)
class Donated:
  """What a newcomer gets from a donor."""

  held: list[Held]  # Θ, by fragment.
  inner: Any  # A copy of the inner optimizer's state.


@dataclasses.dataclass(frozen=True)
class Saved:
  """A learner's own checkpoint."""

  params: dict[str, jax.Array]
  inner: Any
  bases: list[Arrays]
