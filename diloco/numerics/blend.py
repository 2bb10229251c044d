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


def make_blend(name: str, alpha: float = 0.0) -> Blend:
  """Returns the rule `name` as a function of (θ, Θ, s), each by piece name.

  Args:
    alpha: in [0, 1]; 0 for a rule that takes none.
  """
  blend = RULES[name].blend

  def blended(theta: Arrays, new: Arrays, snapshot: Arrays):
    return {
      piece: blend(
        *(jnp.asarray(x[piece], jnp.float32) for x in (theta, new, snapshot)),
        alpha,
      ).astype(theta[piece].dtype)
      for piece in theta
    }

  return blended
