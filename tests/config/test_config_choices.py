# SPDX-License-Identifier: Apache-2.0
"""The words that a configuration allows are those that the packages know."""

from diloco.config import sections
from diloco.models import decoder_config
from diloco.numerics import blend
from diloco.protocol.config import BLENDS


def test_choices_are_the_same_everywhere():
  assert BLENDS.keys() == blend.RULES.keys()
  assert all(BLENDS[n].mixes == blend.RULES[n].takes_alpha for n in BLENDS)
  assert sections.DTYPES == decoder_config.DTYPES
  assert sections.REMATS == decoder_config.REMATS
