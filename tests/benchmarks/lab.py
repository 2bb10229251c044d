# SPDX-License-Identifier: Apache-2.0
"""Measures the overhead of the lab over its inner steps.

    python -m tests.benchmarks.lab

Learners of 131 k parameters, alternating with plain steps on the same batch, in
one process; medians. `XLA_FLAGS=--xla_cpu_multi_thread_eigen=false` gives the
times of a sweep, whose runs have one thread each.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

from diloco.config import run_config
from diloco.lab.process_arrays import ArrayBackend
from diloco.learner.device import Device
from diloco.run.spec import make_run_spec
from diloco.simulator.cluster import Cluster, ClusterOptions
from diloco.simulator.timing import Timing
from experiments import common

LEARNERS = 4
EACH_STEPS = 24  # One cycle of fragments, per turn.


def main(argv: Sequence[str] | None = None):
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--turns', type=int, default=6, help='Of either kind.')
  print(report(parser.parse_args(argv).turns))


def report(turns: int) -> str:
  """Returns the table as text."""
  config = common.base()
  config.model.update(
    layers=2, d_model=64, heads=4, kv_heads=2, head_dim=16, d_ff=192
  )
  config.data.update(seq_len=64)
  config.protocol.update(learners=LEARNERS, total_steps=10**6)
  run_spec = make_run_spec(run_config.build(config))
  device = Device(run_spec)
  cluster = Cluster(
    run_spec.config.protocol,
    Timing(dict.fromkeys(range(LEARNERS), 1.0), jitter=0.05),
    seed=0,
    contents=ArrayBackend(run_spec, device),
    options=ClusterOptions(tokens_per_step=device.tokens_per_step),
  )
  for learner in range(LEARNERS):
    cluster.start(learner)
  plain = _Plain(run_spec, device)
  lab_s, plain_s = [], []
  cluster.run(cluster.sim.now + EACH_STEPS)  # Warm-up.
  plain.run(EACH_STEPS)
  for _ in range(turns):
    before = _steps(cluster)
    took_s = _timed(lambda: cluster.run(cluster.sim.now + EACH_STEPS))
    lab_s.append(took_s / (_steps(cluster) - before))
    plain_s.append(_timed(lambda: plain.run(EACH_STEPS)) / EACH_STEPS)
  lab, alone = statistics.median(lab_s), statistics.median(plain_s)
  return (
    f'a step of one learner in the lab: {1e3 * lab:.2f} ms, of '
    f'{LEARNERS} learners\n'
    f'a plain step: {1e3 * alone:.2f} ms\n'
    f'ratio: {lab / alone:.3f}'
  )


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


def _timed(call) -> float:
  began_s = time.perf_counter()
  call()
  return time.perf_counter() - began_s


if __name__ == '__main__':
  main()
