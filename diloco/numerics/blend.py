# SPDX-License-Identifier: Apache-2.0
"""The rules by which a learner takes in an updated fragment, under `jit`.

θ is what the learner has now, Θ what arrived, and s, the snapshot, the θ that
was copied for the learner's last offer of the fragment. Between the two the
learner made some steps; the rules differ in what becomes of these. They compute
in f32; results have the dtype of θ.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

Arrays = Mapping[str, jax.Array]
Blend = Callable[[Arrays, Arrays, Arrays], dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class BlendRule:
  """A rule of blending.

  Attributes:
    blend: maps θ, Θ, s and α to the next θ, elementwise.
    takes_alpha: True if α has a meaning for it.
  """

  blend: Callable[[jax.Array, jax.Array, jax.Array, float], jax.Array]
  takes_alpha: bool = False


# `protocol.config.BLENDS` says of the same names what the machines must know.
# They are two dicts, as the machines import neither jax nor this package, and
# know nothing of arrays.
RULES = {
  # The paper's rule; steps since the snapshot are lost.
  'replace': BlendRule(lambda theta, new, since, alpha: new),
  # Streaming DiLoCo.
  'interpolate': BlendRule(
    lambda theta, new, since, alpha: alpha * theta + (1 - alpha) * new,
    takes_alpha=True,
  ),
  # Steps since the snapshot are kept.
  'rebase': BlendRule(lambda theta, new, since, alpha: new + (theta - since)),
}


OwnRule = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def make_blend(name: str, alpha: float = 0.0) -> Blend:
  """Returns the rule `name` as a function of (θ, Θ, s), each by piece name.

  Args:
    alpha: in [0, 1]; 0 for a rule that takes none.
  """
  blend = RULES[name].blend
  return by_piece(lambda *arrays: blend(*arrays, alpha))


def by_piece(blend: OwnRule) -> Blend:
  """Returns a rule for single arrays as one of arrays by piece name."""

  def blended(theta: Arrays, new: Arrays, snapshot: Arrays):
    return {
      piece: blend(
        *(jnp.asarray(x[piece], jnp.float32) for x in (theta, new, snapshot))
      ).astype(theta[piece].dtype)
      for piece in theta
    }

  return blended


def check_shapes(blend: OwnRule) -> OwnRule:
  """Checks what a rule of the user's own gives; computes nothing.

  Returns:
    The rule.

  Raises:
    ValueError: it is no function from f32 arrays to one of their shape.
  """
  if not callable(blend):
    raise ValueError(
      f'gave a {type(blend).__name__}, must give a function of (θ, Θ, s)'
    )
  for shape in ((), (3, 2)):
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    found = jax.eval_shape(blend, like, like, like)
    if getattr(found, 'shape', None) != shape or found.dtype != like.dtype:
      raise ValueError(
        f'of three float32 {shape} its rule gives {found}, must give one'
      )
  return blend


def check_values(blend: OwnRule) -> OwnRule:
  """Checks on a device that a rule keeps nothing but progress since s.

  An offer is Θ, as last taken in, minus θ. A rule that left in θ what was there
  before would have the learner offer the work of others as its own.

  Returns:
    The rule.

  Raises:
    ValueError: where θ = s it gives something else than Θ.
  """
  theta, new = jnp.arange(4.0), jnp.full(4, 7.0)
  found = blend(theta, new, theta)
  if not jnp.allclose(found, new):
    raise ValueError(
      f'of θ = s = {theta.tolist()} and Θ = {new.tolist()} its rule makes '
      f'{found.tolist()}, must make Θ: what a learner offers is counted from it'
    )
  return blend
