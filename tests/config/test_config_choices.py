# SPDX-License-Identifier: Apache-2.0
"""The words that a configuration allows are those that the packages know."""

from diloco import config_values
from diloco.models import decoder_config
from diloco.numerics import codec, fragments, inner, schedule


def test_choices_are_the_same_everywhere():
  assert config_values.CODECS == codec.NAMES
  assert config_values.DTYPES == decoder_config.DTYPES
  assert config_values.EMBEDDING_FRAGMENTS == fragments.EMBEDDINGS
  assert config_values.OPTIMIZERS == inner.NAMES
  assert config_values.REMATS == decoder_config.REMATS
  assert config_values.SCHEDULES == schedule.NAMES
  assert config_values.SCHEMES == fragments.SCHEMES
