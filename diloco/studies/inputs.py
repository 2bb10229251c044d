# SPDX-License-Identifier: Apache-2.0
"""The inputs of studies: fleet, network, host speeds, the paper's numbers."""

import statistics
from collections.abc import Sequence

from diloco.config.simulation import FailuresConfig, SimulationConfig
from diloco.fleets import speeds
from diloco.fleets.fleet import Fleet
from diloco.fleets.synchronous import GroupExchange
from diloco.fleets.traffic import fragment_shares
from diloco.numerics.codec import bytes_per_value
from diloco.simulator.network import Network

ENCODE_S = 1.0  # Learner: base − θ, and int4 of it.
TAKE_IN_S = 1.1  # Learner: Θ_p from the update, and its CRC.
PULL_S = 0.75  # Syncer, of each contribution, side by side: decode, check.
MERGE_S = 0.5  # Syncer: RDA …
MERGE_EACH_S = 0.36  # … and of each contribution.
OUTER_STEP_S = 3.3  # Syncer: Nesterov, int4 of the update, residual, CRC.
# Table 1: goodput in percent by system, learners and chips, with interruptions
# of a chip once a year.
GOODPUT = {
  ('data-parallel', 1): {
    150_000: 72, 300_000: 57, 600_000: 38, 1_200_000: 27, 2_400_000: 18,
  },
  ('elastic data-parallel', 1): {
    150_000: 88, 300_000: 80, 600_000: 69, 1_200_000: 58, 2_400_000: 40,
  },
  ('Decoupled DiLoCo', 4): {
    150_000: 96, 300_000: 93, 600_000: 89, 1_200_000: 82, 2_400_000: 73,
  },
  ('Decoupled DiLoCo', 8): {
    150_000: 98, 300_000: 96, 600_000: 94, 1_200_000: 88, 2_400_000: 80,
  },
}  # fmt: skip

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

# What failures cost is not in the paper; these reproduce its table together.
CALIBRATION = {
  'mtbi_days': 365.0,
  'recovery': 'elastic',
  'pause_s': 13.7,
  'repair_s': 66.3,
  'redoes_step': False,
  'trace': '',
}


def fleet_of(config: SimulationConfig, learners: int) -> Fleet:
  """Returns a fleet of `learners`, of which the last `slow_learners` are
  slow.
  """
  fleet = config.fleet
  steps_s = speeds.mean_steps_s(
    learners, fleet.step_s, fleet.slow_learners, fleet.slow_gap
  )
  return Fleet(steps_s, fleet.tokens, fleet.jitter, fleet.drift)


def network_of(config: SimulationConfig) -> Network:
  """Sizes of all that travels, and what carries it."""
  network, codec = config.network, config.codec
  shares = fragment_shares(config.protocol.fragments, network.embedding_share)

  def sizes(name: str) -> tuple[float, ...]:
    each = bytes_per_value(name, codec.block_size, codec.scale)
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


def exchange_of(
  config: SimulationConfig, streams: bool, groups: int
) -> GroupExchange:
  """Returns the exchange that groups in lock-step wait for.

  An exchange is the bytes of all parameters, or of the largest fragment, up and
  down a group's link and all groups' through the syncer's, and a round trip.
  Encoding and merging are left out: all chips share in them.

  Args:
    streams: streaming DiLoCo, otherwise synchronous DiLoCo.
    groups: number of groups that share the syncer's link.
  """
  protocol = config.protocol
  network = network_of(config)
  of_all = max if streams else sum
  bits = 8 * (of_all(network.up_bytes) + of_all(network.down_bytes))
  transfer_s = max(
    bits / network.learner_bps, groups * bits / network.syncer_bps
  )
  exchange_s = transfer_s + 2 * network.latency_s
  if streams:
    return GroupExchange(
      protocol.spacing_steps, protocol.overlap_steps, exchange_s
    )
  return GroupExchange(protocol.sync_every_steps, 0, exchange_s)


def said(runs: int) -> str:
  """The note that tells what mean and spread are of."""
  if runs == 1:
    return 'One run: no spread.'
  return f'Means over {runs} runs (seeds) ± their standard deviation.'


def mean(values: Sequence[float]) -> float:
  return statistics.fmean(values)


def spread(values: Sequence[float]) -> float | None:
  """Standard deviation of the runs; None of a single one."""
  return statistics.stdev(values) if len(values) > 1 else None


# Measured speeds of a host's work on a fragment.
#
# Seconds per GB of the fragment in f32, int4 with blocks of 128, on one of two
# cores that other processes shared: the best of nine calls of the functions
# that learner and syncer run, on 8 M values. All of it runs on one thread per
# stage.


def merge_s(learners: int) -> float:
  """Returns seconds per GB of the syncer's merge of `learners`
  contributions.
  """
  return MERGE_S + MERGE_EACH_S * learners + OUTER_STEP_S


def is_calibration(failures: FailuresConfig) -> bool:
  """Returns True if the paper's table answers the same question."""
  return all(
    getattr(failures, key) == value for key, value in CALIBRATION.items()
  )
