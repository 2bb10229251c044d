# SPDX-License-Identifier: Apache-2.0
"""Shared by studies: inputs, the paper's figures, records of runs as tables.

A row of a table is a cell of the study, a record the figures of one run.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

from diloco.config.simulation import FailuresConfig, SimulationConfig
from diloco.fleets import fleet, pauses, speeds, traffic
from diloco.fleets.failures import FaultEvents
from diloco.fleets.fleet import DecoupledFleet, Fleet
from diloco.pages.parts import Cell, Column, Part, ReportPage, Table
from diloco.simulator.network import Network

# Table 1: goodput in percent by system and learners, then by chips, with
# interruptions of a chip once a year; its learners are elastic.
CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
GOODPUT = {
  ('data-parallel', 1): dict(zip(CHIPS, (72, 57, 38, 27, 18))),
  ('elastic data-parallel', 1): dict(zip(CHIPS, (88, 80, 69, 58, 40))),
  ('Decoupled DiLoCo', 4): dict(zip(CHIPS, (96, 93, 89, 82, 73))),
  ('Decoupled DiLoCo', 8): dict(zip(CHIPS, (98, 96, 94, 88, 80))),
}
# What failures cost is not in the paper; these reproduce its table together.
CALIBRATION = {'mtbi_days': 365.0, 'pause_s': pauses.FITTED_S, 'repair_s': 66.3}
# Table 4: time relative to no extra learners, by extra compute during half of
# the work, as a share of the permanent compute.
SCAVENGING = {0.0: 1.0, 0.25: 0.9, 0.5: 0.83, 1.0: 0.75, 3.0: 0.62}
SCAVENGING_DATA_PARALLEL = {
  0.0: 1.0,
  0.25: 1.07,
  0.5: 1.09,
  1.0: 1.02,
  3.0: 0.8,
}
# Table 5: what it calls goodput, in percent, by `HeterogeneousStudy.SETTINGS`:
# rounds closed, of those that full speed makes due.
HETEROGENEOUS = {'K=M': 84.0, 'K=1': 100.0, 'K=1 grace': 100.0}


def is_calibration(failures: FailuresConfig) -> bool:
  """Returns True if the paper's table answers the same question."""
  return all(getattr(failures, key) == CALIBRATION[key] for key in CALIBRATION)


def fleet_of(config: SimulationConfig, learners: int) -> Fleet:
  """Returns a fleet of `learners`; the last `slow_learners` are slow."""
  fleet = config.fleet
  steps_s = speeds.mean_steps_s(
    learners, fleet.step_s, fleet.slow_learners, fleet.slow_gap
  )
  return Fleet(steps_s, (fleet.tokens,) * learners, fleet.jitter)


def network_of(config: SimulationConfig) -> Network:
  """Sizes of all that travels, and what carries it."""
  network, codec = config.network, config.codec
  shares = traffic.fragment_shares(
    config.protocol.fragments, network.embedding_share
  )

  def sizes(name: str) -> tuple[float, ...]:
    each = codec.value_bytes(name)
    return tuple(share * network.params * each for share in shares)

  return Network(
    up_bytes=sizes(codec.up),
    down_bytes=sizes(codec.down),
    full_bytes=sizes('f32'),
    state_bytes=network.params * network.state_bytes_per_param,
    learner_bps=1e9 * network.learner_gbps,
    syncer_bps=1e9 * network.syncer_gbps,
    datacentres=network.datacentres,
    latency_s=network.latency_s,
    encode_s=network.encode_s,
    merge_s=network.merge_s,
  )


def decoupled(
  config: SimulationConfig,
  seed: int,
  until_s: float,
  fault_events: FaultEvents | None = None,
  **protocol,
) -> DecoupledFleet:
  """Runs the real machines on the fleet of a configuration.

  Args:
    protocol: what differs from `config.protocol`.
  """
  own = dataclasses.replace(config.protocol, **protocol)
  return fleet.run(
    own,
    fleet_of(config, own.learners),
    network_of(config),
    fault_events or FaultEvents(),
    seed,
    until_s,
  )


# Records of runs as tables.

Record = Mapping[str, float | None]  # The figures of one run, by name.


@dataclasses.dataclass(frozen=True)
class Field:
  """A column: a label of the row, or the mean of a figure over its runs."""

  name: str
  key: str = ''  # Of the records; '': a label, under the column's name.
  digits: int = 1
  factor: float = 1.0
  spread: bool = False  # With the standard deviation over the runs.
  hidden: bool = False  # In files only.

  def columns(self) -> tuple[Column, ...]:
    if not self.spread:
      return (Column(self.name, self.digits, hidden=self.hidden),)
    return with_spread(self.name, self.digits, self.hidden)

  def cells(self, labels: Mapping[str, Cell], runs: Sequence[Record]):
    if not self.key:
      return (labels.get(self.name),)
    middle, off = mean(runs, self.key), spread(runs, self.key)
    pair = (times(self.factor, middle), times(self.factor, off))
    return pair if self.spread else pair[:1]


def table(
  name: str,
  title: str,
  fields: Sequence[Field],
  rows: Iterable[tuple[Mapping[str, Cell], Sequence[Record]]],
  notes: Sequence[str] = (),
) -> Table:
  """Returns a table of rows, each of labels and the records of its runs."""
  return Table(
    name,
    title,
    tuple(column for field in fields for column in field.columns()),
    tuple(
      tuple(cell for field in fields for cell in field.cells(labels, runs))
      for labels, runs in rows
    ),
    tuple(notes),
  )


def with_spread(
  name: str, digits: int, hidden: bool = False
) -> tuple[Column, Column]:
  """Returns a column and that of its standard deviation, in files only."""
  return (
    Column(name, digits, spread=f'{name} ±', hidden=hidden),
    Column(f'{name} ±', digits, hidden=True),
  )


def page(
  config: SimulationConfig,
  title: str,
  paragraphs: Iterable[str],
  parts: Iterable[Part],
) -> ReportPage:
  """Returns the page of a study of this configuration."""
  command = 'python -m diloco.simulate'  # Its arguments are the caller's.
  return ReportPage(
    config.name, title, command, tuple(paragraphs), tuple(parts)
  )


def _values(runs: Sequence[Record], key: str) -> list[float]:
  return [run[key] for run in runs if run.get(key) is not None]


def mean(runs: Sequence[Record], key: str) -> float | None:
  known = _values(runs, key)
  return statistics.fmean(known) if known else None


def spread(runs: Sequence[Record], key: str) -> float | None:
  """Standard deviation over the runs; None of fewer than two."""
  known = _values(runs, key)
  return statistics.stdev(known) if len(known) > 1 else None


def times(factor: float, value: float | None) -> float | None:
  return None if value is None else factor * value


def over(runs: int) -> str:
  """The note that says what mean and spread are of."""
  if runs == 1:
    return 'One run: no spread.'
  return f'Means over {runs} runs (seeds) ± their standard deviation.'
