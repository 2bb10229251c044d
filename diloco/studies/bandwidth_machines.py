# SPDX-License-Identifier: Apache-2.0
"""The real protocol machines on narrow links: what suffers is the pace."""

import dataclasses
import statistics
from collections.abc import Callable

from diloco.pages.parts import Column, Table
from diloco.sim import decoupled
from diloco.sim.happenings import Happenings
from diloco.sim.wires import SYNCER
from diloco.simulation_config import SimulationConfig
from diloco.studies.machines import fleet_of, network_of

CYCLES = 10  # Simulated, of H steps each.


def table(config: SimulationConfig, say: Callable[[str], None]) -> Table:
  """Pace, staleness and traffic of every codec at every bandwidth."""
  rows = []
  for codec in dict.fromkeys(('bf16', config.codec.up)):
    own = codec == config.codec.up
    down = config.codec.down if own else codec
    changed = dataclasses.replace(
      config, codec=dataclasses.replace(config.codec, up=codec, down=down)
    )
    for gbps in config.study.gbps:
      rows.append(_row(changed, gbps))
      say(f'real machines, {codec} at {gbps:g} Gbit/s')
  network = config.network
  return Table(
    'bandwidth_machines',
    f'The real machines: {config.protocol.learners} learners in '
    f'{network.datacentres} data centres, T = {config.fleet.step_s:g} s',
    (
      Column('codec'),
      Column('Gbit/s', 2),
      Column('pace %', 1, spread='pace spread'),
      Column('pace spread', 1, hidden=True),
      Column('stepping %', 1),
      Column('merged in %', 1),
      Column('versions behind', 2),
      Column('mean Gbit/s', 2),
      Column('peak Gbit/s', 2),
    ),
    tuple(rows),
    notes=(
      'pace: rounds closed per round that steps made due; stepping: share of '
      'the time.',
      'merged in: rounds that took a learner in, versions behind: of its base; '
      'means.',
      "mean and peak: busiest direction of a learner's link; the peak is over "
      'one step.',
      'Whoever misses an update fetches the whole fragment in f32.',
    ),
  )


def _row(config: SimulationConfig, gbps: float) -> tuple:
  """Means over the seeds."""
  network = dataclasses.replace(network_of(config), learner_bps=1e9 * gbps)
  protocol = config.protocol
  until_s = CYCLES * protocol.sync_every_steps * config.fleet.step_s
  outcomes = [
    decoupled.run(
      protocol,
      fleet_of(config, protocol.learners),
      network,
      Happenings(),
      seed,
      until_s,
    )
    for seed in range(config.seed, config.seed + config.study.seeds)
  ]
  paces = [100 * outcome.pace for outcome in outcomes]
  return (
    config.codec.up,
    gbps,
    statistics.fmean(paces),
    statistics.stdev(paces) if len(paces) > 1 else 0.0,
    statistics.fmean(100 * outcome.goodput for outcome in outcomes),
    100 * _over_learners(outcomes, decoupled.Outcome.participation),
    _over_learners(outcomes, decoupled.Outcome.staleness),
    statistics.fmean(_busiest(o, lambda use: use.mean_bps) for o in outcomes),
    statistics.fmean(_busiest(o, lambda use: use.peak_bps) for o in outcomes),
  )


def _over_learners(outcomes, figure) -> float:
  return statistics.fmean(figure(o, m) for o in outcomes for m in o.learners)


def _busiest(outcome: decoupled.Outcome, bps) -> float:
  """Gbit/s of the learners' busiest link, one way; 0 where none is used."""
  used = [bps(use) for use in outcome.links if use.process != SYNCER]
  return max(used, default=0.0) / 1e9
