# SPDX-License-Identifier: Apache-2.0
"""The rules by which a learner takes in an updated fragment, under `jit`.

θ is what the learner has now, `global_` the Θ_p that arrived, and `snapshot`
the θ that was copied for the learner's last offer of the fragment. Between the
two the learner made some steps; the rules differ in what becomes of these.
Results have the dtype of θ.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

Arrays = Mapping[str, jax.Array]
Blend = Callable[[Arrays, Arrays, Arrays], dict[str, jax.Array]]


def make_blend(name: str, alpha: float = 0.0) -> Blend:
  """Returns the rule `name` as a function of (theta, global_, snapshot).

  Raises:
    ValueError: an unknown name, alpha outside [0, 1], or alpha of a rule that
      takes none.
  """
  if name not in RULES:
    raise ValueError(f'blend {name!r}, must be one of {tuple(RULES)}')
  if not 0 <= alpha <= 1:
    raise ValueError(f'alpha={alpha}, must be in [0, 1]')
  if alpha and not RULES[name].takes_alpha:
    raise ValueError(f'alpha={alpha} has no meaning for {name!r}')
  return RULES[name].make(alpha)


def overwrite(theta: Arrays, global_: Arrays) -> dict[str, jax.Array]:
  """θ' = Θ: the paper's rule; steps since the snapshot are lost."""
  return {name: global_[name].astype(theta[name].dtype) for name in theta}


def mix(
  theta: Arrays, global_: Arrays, alpha: float | jax.Array
) -> dict[str, jax.Array]:
  """θ' = α·θ + (1 - α)·Θ, in f32 (Streaming DiLoCo)."""
  return {
    name: (
      alpha * _f32(theta[name]) + (1 - alpha) * _f32(global_[name])
    ).astype(theta[name].dtype)
    for name in theta
  }


def carry(
  theta: Arrays, global_: Arrays, snapshot: Arrays
) -> dict[str, jax.Array]:
  """θ' = Θ + (θ - snapshot), in f32: steps since the snapshot are kept."""
  return {
    name: (
      _f32(global_[name]) + (_f32(theta[name]) - _f32(snapshot[name]))
    ).astype(theta[name].dtype)
    for name in theta
  }


def _f32(x) -> jax.Array:
  return jnp.asarray(x, jnp.float32)


@dataclasses.dataclass(frozen=True)
class BlendRule:
  """A rule of blending.

  Attributes:
    make: takes α and returns the rule.
    takes_alpha: True if α has a meaning for it.
  """

  make: Callable[[float], Blend]
  takes_alpha: bool = False


# `protocol.config.BLENDS` says of the same names what the machines must know.
# They are two dicts, as the machines import neither jax nor this package, and
# know nothing of arrays.
RULES = {
  'overwrite': BlendRule(
    lambda _: lambda theta, new, since: overwrite(theta, new)
  ),
  'mix': BlendRule(
    lambda alpha: lambda theta, new, since: mix(theta, new, alpha),
    takes_alpha=True,
  ),
  'carry': BlendRule(lambda _: carry),
}
