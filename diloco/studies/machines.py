# SPDX-License-Identifier: Apache-2.0
"""Converts a configuration's fleet and network to those of the simulator."""

from diloco.sim import speeds
from diloco.sim.decoupled import Fleet
from diloco.sim.links import Network
from diloco.sim.lockstep import Exchange
from diloco.sim.payload_bytes import bytes_per_value, fragment_shares
from diloco.simulation_config import SimulationConfig


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
) -> Exchange:
  """Returns the exchange that groups in lock-step wait for.

  An exchange is the bytes of all parameters, or of the largest fragment, up and
  down a group's link and all groups' through the syncer's, and a round trip.
  Encoding and merging are left out: all chips share in them.

  Args:
    config: has network and protocol.
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
    return Exchange(protocol.spacing_steps, protocol.overlap_steps, exchange_s)
  return Exchange(protocol.sync_every_steps, 0, exchange_s)
