# SPDX-License-Identifier: Apache-2.0
"""The inner and outer optimizers by name; importing this imports no jax."""

import dataclasses
from collections.abc import Callable
from typing import Any


def _adamw(section, specs, axes):
  del axes
  from diloco.numerics import inner

  return inner.adamw(**inner.settings_of(section), specs=specs)


def _muon(section, specs, axes):
  from diloco.numerics import inner

  return inner.muon(**inner.settings_of(section), specs=specs, axes=axes)


def _sgd(section, specs, axes):
  """Returns the plain gradient, neither clipped nor decayed."""
  del section, specs, axes
  import optax

  return optax.identity()


# Each takes the section `inner`, the tensors' `TensorSpec`s by path, and the
# logical names of their axes by path. It returns a transformation of optax,
# whose updates are not scaled by the learning rate, see `inner`.
INNER = {'adamw': _adamw, 'muon': _muon, 'sgd': _sgd}


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


def moments_of(name: str) -> int:
  """Returns the arrays of the size of Θ in the state of an outer optimizer.

  One of the user's own is taken to have as many as any of ours.
  """
  kind = OUTER.get(name)
  return kind.moments if kind else max(x.moments for x in OUTER.values())
