# SPDX-License-Identifier: Apache-2.0
"""The base of simulation configurations: all keys with their defaults.

Keys, defaults, types and rules stand in `diloco/config/simulation.py`.
"""

import ml_collections

from diloco.config import simulation


def base(kind: str) -> ml_collections.ConfigDict:
  """A valid simulation; experiments change what they are about.

  Args:
    kind: of the study, such as 'goodput'.
  """
  return ml_collections.ConfigDict(simulation.defaults(kind))
