# SPDX-License-Identifier: Apache-2.0
"""Measures what a simulated learner-step costs, without arrays and in the lab.

Without, by the number of learners: the real machines at the paper's settings
(P = H = 24, τ = 2, K = 1), over links of 10 Gbit/s, with 10 % jitter; CPU time
of one thread. A learner-step is one inner step of one learner with all that
belongs to it: snapshot, offer, pull, merge, update, fetch. No event makes the
syncer look at all of its members, so it should hardly grow with M.

In the lab: learners of 131 k parameters, alternating with plain steps on the
same batch, in one process; medians, in wall time. The environment variable
`XLA_FLAGS=--xla_cpu_multi_thread_eigen=false` gives the times of a sweep, whose
runs have one thread each.
"""

import statistics
import time

from diloco.bench.measurement import BenchFigure, BenchSettings, timed
from diloco.bench.real_run import get_config
from diloco.config import run_config
from diloco.fleets.failures import FaultEvents
from diloco.fleets.fleet import Fleet, FleetResult, run
from diloco.lab.process_arrays import ArrayBackend
from diloco.learner.device import Device
from diloco.protocol.config import ProtocolConfig
from diloco.run.spec import make_run_spec
from diloco.simulator.cluster import Cluster, ClusterOptions
from diloco.simulator.network import Network
from diloco.simulator.timing import Timing

LEARNERS = (16, 64, 256)
FRAGMENTS = 24
ALONE = 'a learner-step with M = 1'
LAB_LEARNERS = 4
EACH_STEPS = 24  # One cycle of fragments, per turn.
TURNS = 6  # Of either kind.
SMALLEST = {'layers': 1, 'd_model': 32, 'd_ff': 32}


def measure(settings: BenchSettings) -> list[BenchFigure]:
  """Measures every M, and M = 1 before them."""
  learner_steps = settings.pick(4000, 64)
  steps_min = settings.pick(FRAGMENTS, 4)
  alone_us = _microseconds(1, learner_steps)
  found = [BenchFigure('M = 1', alone_us, 'µs')]
  for learners in settings.pick(LEARNERS, (2, 4)):
    steps = max(steps_min, learner_steps // learners)
    each_us = _microseconds(learners, steps)
    found.append(
      BenchFigure(f'M = {learners}', each_us, 'µs', each_us / alone_us, ALONE)
    )
  return found


def _microseconds(learners: int, steps: int) -> float:
  began_s = time.process_time()
  outcome = simulate(learners, steps)
  return 1e6 * (time.process_time() - began_s) / outcome.steps


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


def measure_lab(settings: BenchSettings) -> list[BenchFigure]:
  """Measures a step of one learner in the lab, beside a plain step."""
  config = get_config()
  config.model.update(
    layers=2, d_model=64, heads=4, kv_heads=2, head_dim=16, d_ff=192
  )
  config.model.update(settings.pick({}, SMALLEST))
  config.data.update(seq_len=settings.pick(64, 16))
  config.protocol.update(learners=LAB_LEARNERS, total_steps=10**6)
  run_spec = make_run_spec(run_config.build(config))
  device = Device(run_spec)
  cluster = Cluster(
    run_spec.config.protocol,
    Timing(dict.fromkeys(range(LAB_LEARNERS), 1.0), jitter=0.05),
    seed=0,
    contents=ArrayBackend(run_spec, device),
    options=ClusterOptions(tokens_per_step=device.tokens_per_step),
  )
  for learner in range(LAB_LEARNERS):
    cluster.start(learner)
  plain = _Plain(run_spec, device)
  lab_s, plain_s = [], []
  cluster.run(cluster.sim.now + EACH_STEPS)  # Warm-up.
  plain.run(EACH_STEPS)
  for _ in range(settings.pick(TURNS, 1)):
    before = _steps(cluster)
    took_s = timed(lambda: cluster.run(cluster.sim.now + EACH_STEPS))
    lab_s.append(took_s / (_steps(cluster) - before))
    plain_s.append(timed(lambda: plain.run(EACH_STEPS)) / EACH_STEPS)
  lab, alone = statistics.median(lab_s), statistics.median(plain_s)
  name = f'a learner-step, M = {LAB_LEARNERS}'
  return [BenchFigure(name, 1e3 * lab, 'ms', lab / alone, 'a plain step')]


class _Plain:
  """Times the same inner step without the lab."""

  def __init__(self, run_spec, device: Device):
    self._device = device
    self._dataset = run_spec.dataset(0)
    self._params, self._state = device.init(run_spec.initial_parameters())
    self._position = 0

  def run(self, steps: int):
    for _ in range(steps):
      batch = self._device.put_batch(self._dataset[self._position])
      self._params, self._state, metrics = self._device.step(
        self._params, self._state, batch, 1e-3, (0, self._position)
      )
      float(metrics['loss'])
      self._position += 1


def _steps(cluster: Cluster) -> int:
  return sum(process.steps for process in cluster.learners.values())
