# SPDX-License-Identifier: Apache-2.0
"""The inner and outer optimizers by name; importing this imports no jax."""

import dataclasses
from collections.abc import Callable
from typing import Any


def _adamw(**settings):
  from diloco.numerics import inner

  return inner.adamw(**settings)


def _sgd(**settings):
  """Returns the plain gradient, neither clipped nor decayed."""
  del settings
  import optax

  return optax.identity()


# Each takes the arguments of `inner.adamw`, and returns a transformation of
# optax.
INNER = {'adamw': _adamw, 'sgd': _sgd}


@dataclasses.dataclass(frozen=True)
class OuterKind:
  """An outer optimizer.

  Attributes:
    make: takes the section `outer` and an `outer.Anneal`, or None. Returns a
      transformation of optax with the same bits on every CPU, see `outer`.
    moments: arrays of the size of Θ in its state.
    anneals: True if it follows `outer.anneal_fraction`.
  """

  make: Callable[[Any, Any], Any]
  moments: int
  anneals: bool = False


def _outer_sgd(settings, anneal):
  from diloco.numerics import outer

  return outer.make_outer(
    settings.lr, settings.momentum, settings.nesterov, anneal
  )


def _outer_adam(settings, anneal):
  del anneal
  from diloco.numerics import outer

  return outer.make_adam(
    settings.lr, settings.momentum, settings.b2, settings.eps
  )


OUTER = {
  'sgd': OuterKind(_outer_sgd, moments=1, anneals=True),
  'adam': OuterKind(_outer_adam, moments=2),
}
