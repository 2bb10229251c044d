# SPDX-License-Identifier: Apache-2.0
"""The faults of a configuration, checked against its system."""

from diloco import config_faults
from diloco.config import RunConfig
from diloco.config_faults import Kill
from diloco.config_values import ConfigError


def plan(config: RunConfig) -> tuple[Kill, ...]:
  """Returns the faults in the order in which they are due.

  Raises:
    ConfigError: names each fault that can't be read, or that is impossible in a
      run of `lab.system`.
  """
  system = config.lab.system
  alone = system == 'alone'
  kills = config_faults.plan(
    config.faults, 1 if alone else config.protocol.learners
  )
  if system != 'decoupled' and any(kill.learner is None for kill in kills):
    raise ConfigError(
      [f'faults: lab.system={system!r} has no syncer that could be killed']
    )
  return kills
