# SPDX-License-Identifier: Apache-2.0
"""What a configuration says of fleet and network, as the simulator takes it."""

from diloco.sim import speeds
from diloco.sim.decoupled import Fleet
from diloco.sim.links import Network
from diloco.sim.payload_bytes import bytes_per_value, fragment_shares
from diloco.simulation_config import SimulationConfig


def fleet_of(config: SimulationConfig, learners: int) -> Fleet:
  """`learners` learners, of which the last `slow_learners` are slow."""
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
