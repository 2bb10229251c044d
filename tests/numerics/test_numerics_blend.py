# SPDX-License-Identifier: Apache-2.0
"""Three rules take in an update; the tests show where they coincide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.numerics import blend


def arrays(seed: int, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  return {
    'a': jnp.asarray(rng.standard_normal((3, 5)), dtype),
    'b[2]': jnp.asarray(rng.standard_normal(()), dtype),
  }


THETA, GLOBAL, SNAPSHOT = arrays(0), arrays(1), arrays(2)


def test_formulas():
  given = THETA, GLOBAL, SNAPSHOT
  mixed = blend.make_blend('interpolate', 0.25)(*given)
  carried = blend.make_blend('rebase')(*given)
  overwritten = blend.make_blend('replace')(*given)
  for name in THETA:
    t, g, s = (np.float64(x[name]) for x in given)
    np.testing.assert_allclose(mixed[name], 0.25 * t + 0.75 * g, rtol=1e-6)
    np.testing.assert_allclose(carried[name], g + (t - s), rtol=1e-6)
    np.testing.assert_array_equal(overwritten[name], GLOBAL[name])


@pytest.mark.parametrize('name', blend.RULES)
def test_rules_by_name_are_jittable_donatable_and_keep_the_dtype(name):
  rule = jax.jit(blend.make_blend(name), donate_argnums=0)
  blended = rule(arrays(0, jnp.bfloat16), GLOBAL, arrays(0, jnp.bfloat16))
  # θ is the snapshot and alpha is 0: every rule gives Θ, in the dtype of θ.
  for key, v in GLOBAL.items():
    assert blended[key].dtype == jnp.bfloat16
    np.testing.assert_array_equal(blended[key], v.astype(jnp.bfloat16))
