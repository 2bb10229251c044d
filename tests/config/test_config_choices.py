# SPDX-License-Identifier: Apache-2.0
"""The words that a configuration allows are those that the packages know."""

from diloco.config import sections
from diloco.models import decoder_config
from diloco.numerics import blend, fragments
from diloco.protocol.config import BLENDS


def test_choices_are_the_same_everywhere():
  assert tuple(BLENDS) == blend.NAMES
  assert sections.DTYPES == decoder_config.DTYPES
  assert sections.EMBEDDING_FRAGMENTS == fragments.EMBEDDINGS
  assert sections.REMATS == decoder_config.REMATS
  assert sections.SCHEMES == fragments.SCHEMES
