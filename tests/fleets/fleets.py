# SPDX-License-Identifier: Apache-2.0
"""Small fleets for the tests."""

from diloco.fleets import fleet
from diloco.fleets.failures import FaultEvents
from diloco.protocol.config import ProtocolConfig
from diloco.simulator.network import Network

NOTHING = FaultEvents()


def config_of(**changes) -> ProtocolConfig:
  """Returns a run of two learners, four fragments, one round per step."""
  fields = {
    'learners': 2,
    'fragments': 4,
    'sync_every_steps': 4,
    'overlap_steps': 2,
    'quorum': 1,
    'grace_safety': 0.8,
    'grace_cap_steps': 1.0,
    'admission': 'latest',
    'max_staleness_versions': 4,
    'weighting': 'tokens',
    'patience': 1.0,
    'total_steps': 10**9,
    'blend': 'replace',
  }
  return ProtocolConfig(**fields | changes)


def network_of(fragments: int = 4, **changes) -> Network:
  """Fragments of 1 Mbit up, 2 Mbit down; no limit, no latency."""
  fields = {
    'up_bytes': (125e3,) * fragments,
    'down_bytes': (250e3,) * fragments,
    'full_bytes': (1e6,) * fragments,
    'state_bytes': 12e6,
  }
  return Network(**fields | changes)


def run(
  until_s: float,
  fault_events: FaultEvents = NOTHING,
  jitter: float = 0.0,
  seed: int = 0,
  network: Network | None = None,
  step_s: float = 1.0,
  timeline_s: float = 0.0,
  **changes,
) -> fleet.DecoupledFleet:
  """A fleet of as many learners as the protocol has."""
  config = config_of(**changes)
  return fleet.run(
    config,
    fleet.Fleet((step_s,) * config.learners, (1000,) * config.learners, jitter),
    network or network_of(config.fragments),
    fault_events,
    seed,
    until_s,
    timeline_s,
  )
