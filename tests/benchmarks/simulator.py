# SPDX-License-Identifier: Apache-2.0
"""Measures what a simulated learner-step costs, by the number of learners.

    python -m tests.benchmarks.simulator

The real machines at the paper's settings (P = H = 24, τ = 2, K = 1), over
links of 10 Gbit/s, with 10 % jitter; one thread, best of some repetitions. A
learner-step is one inner step of one learner with all that belongs to it:
snapshot, offer, pull, merge, update, fetch. What grows with M beyond the
learner-steps is the syncer's look at its members at every event.
"""

import argparse
import time
from collections.abc import Sequence

from diloco.fleets.failures import FaultEvents
from diloco.fleets.fleet import Fleet, FleetResult, run
from diloco.protocol.config import ProtocolConfig
from diloco.simulator.network import Network

LEARNERS = (1, 2, 4, 8, 16, 32, 64)
FRAGMENTS = 24


def main(argv: Sequence[str] | None = None):
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    '--learner_steps', type=int, default=4000, help='In each simulation.'
  )
  parser.add_argument('--repeat', type=int, default=3, help='Best of so many.')
  args = parser.parse_args(argv)
  print(report(args.learner_steps, args.repeat))


def report(learner_steps: int, repeat: int) -> str:
  """Returns the table as text."""
  rows = [
    'learners  learner-steps   CPU s  µs per learner-step  events per it  '
    'µs per event  against M = 1'
  ]
  first_us = None
  for learners in LEARNERS:
    steps = max(1, learner_steps // learners)
    took_s, outcome = min(
      (_timed(learners, steps) for _ in range(repeat)), key=lambda x: x[0]
    )
    each_us = 1e6 * took_s / outcome.steps
    first_us = first_us or each_us
    rows.append(
      f'{learners:8}  {outcome.steps:13}  {took_s:6.2f}  {each_us:19.0f}  '
      f'{outcome.events / outcome.steps:13.1f}  '
      f'{1e6 * took_s / outcome.events:12.1f}  {each_us / first_us:13.2f}'
    )
  return '\n'.join(rows)


def simulate(learners: int, steps: int) -> FleetResult:
  """Simulates `steps` inner steps of 1 s of each of `learners` learners."""
  config = ProtocolConfig(
    learners=learners,
    fragments=FRAGMENTS,
    sync_every_steps=FRAGMENTS,
    overlap_steps=2,
    quorum=1,
    grace_safety=0.8,
    grace_cap_steps=1.0,
    admission='latest',
    max_staleness_versions=4,
    weighting='tokens',
    patience=1.0,
    total_steps=10**9,
    blend='overwrite',
  )
  network = Network(
    up_bytes=(1e8,) * FRAGMENTS,
    down_bytes=(1e8,) * FRAGMENTS,
    full_bytes=(8e8,) * FRAGMENTS,
    state_bytes=6e10,
    learner_bps=1e10,
    latency_s=0.01,
    encode_s=0.02,
    merge_s=0.05,
  )
  fleet = Fleet((1.0,) * learners, tokens=1 << 20, jitter=0.1)
  return run(config, fleet, network, FaultEvents(), 0, until_s=float(steps))


def _timed(learners: int, steps: int) -> tuple[float, FleetResult]:
  began_s = time.process_time()
  outcome = simulate(learners, steps)
  return time.process_time() - began_s, outcome


if __name__ == '__main__':
  main()
