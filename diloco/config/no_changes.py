# SPDX-License-Identifier: Apache-2.0
"""The configuration of a command that has only --config.KEY=VALUE."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns no key: all have their defaults."""
  return ml_collections.ConfigDict()
