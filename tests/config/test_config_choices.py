# SPDX-License-Identifier: Apache-2.0
"""A blend stands in two registries, which say the same of it."""

from diloco.numerics import blend
from diloco.protocol.config import BLENDS


def test_a_blend_is_in_both_registries():
  assert BLENDS.keys() == blend.RULES.keys()
  assert all(
    BLENDS[n].interpolates == blend.RULES[n].takes_alpha for n in BLENDS
  )
