# SPDX-License-Identifier: Apache-2.0
"""The runs of the study of learners of unequal speed."""

import dataclasses
import random

from diloco.protocol.config import ProtocolConfig
from diloco.sim import decoupled, lockstep
from diloco.sim.happenings import Happenings
from diloco.sim.speeds import Speeds
from diloco.simulation_config import SimulationConfig
from diloco.studies import machines


def protocol_of(setting: str, config: ProtocolConfig) -> ProtocolConfig:
  """The protocol of one setting.

  Args:
    setting: of `HeterogeneousStudy.SETTINGS`: a quorum, then what it has. The
      grace window is the configured one, or none; admission is the paper's,
      'fresh', unless 'latest' stands there.
    config: of everything else.
  """
  quorum, *has = setting.split()
  return dataclasses.replace(
    config,
    quorum=config.learners if quorum == 'K=M' else 1,
    grace_cap_steps=config.grace_cap_steps if 'grace' in has else 0.0,
    admission='latest' if 'latest' in has else 'fresh',
  )


def fast(config: SimulationConfig) -> range:
  return range(config.protocol.learners - config.fleet.slow_learners)


def slow(config: SimulationConfig) -> range:
  return range(fast(config).stop, config.protocol.learners)


def run(config: SimulationConfig, setting: str, i: int) -> decoupled.Outcome:
  """The i-th run of a setting; the first keeps what a timeline shows."""
  return decoupled.run(
    protocol_of(setting, config.protocol),
    machines.fleet_of(config, config.protocol.learners),
    machines.network_of(config),
    Happenings(),
    config.seed + i,
    until_s=config.study.steps * config.fleet.step_s,
    timeline_s=config.study.timeline_s if i == 0 else 0.0,
  )


def run_in_lockstep(config: SimulationConfig, i: int) -> lockstep.Outcome:
  """Streaming DiLoCo on the same fleet: one program, M groups."""
  fleet, groups = config.fleet, config.protocol.learners
  steps_s = machines.fleet_of(config, groups).step_s
  return lockstep.run(
    [()] * groups,
    [
      Speeds(
        step_s,
        fleet.jitter,
        fleet.drift,
        random.Random(f'steps of {group}, seed {config.seed + i}'),
      )
      for group, step_s in enumerate(steps_s)
    ],
    config.study.steps * fleet.step_s,
    machines.exchange_of(config, True, groups),
  )
