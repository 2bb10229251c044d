# SPDX-License-Identifier: Apache-2.0
"""The inner optimizers by name; importing this imports no jax."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class InnerSettings:
  """The arguments of `inner.make_inner`, besides the name."""

  b1: float
  b2: float
  eps: float
  weight_decay: float
  clip_norm: float
  specs: Mapping[str, Any] | None


def _adamw(settings: InnerSettings):
  from diloco.numerics import inner

  return inner.adamw(settings)


def _sgd(settings: InnerSettings):
  """Returns the plain gradient, neither clipped nor decayed."""
  del settings
  import optax

  return optax.identity()


# Each takes the settings and returns a transformation of optax.
INNER = {
  'adamw': _adamw,
  'sgd': _sgd,
}
