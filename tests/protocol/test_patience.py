# SPDX-License-Identifier: Apache-2.0
"""Time-outs: from what is measured, right for any step time without tuning."""

import pytest

from diloco.protocol import patience
from diloco.protocol.grace import Ema
from diloco.sim.cluster import Cluster, Timing
from diloco.sim.watch import Log
from tests.protocol.stages import config_of

STEPS = 500


@pytest.mark.parametrize(
  'step_s,expected_s', [(None, 10.0), (0.01, 10.0), (1.0, 10.0), (60.0, 360.0)]
)
def test_silence_is_a_floor_or_steps(step_s, expected_s):
  assert patience.silence_max_s(Ema(step_s), patience=1.0) == expected_s


def test_patience_stretches_every_time_out():
  once, twice = (
    (
      patience.silence_floor_s(knob),
      patience.silence_max_s(Ema(60.0), knob),
      patience.transfer_max_s(10**9, Ema(None), knob),
      patience.transfer_max_s(10**9, Ema(1e-7), knob),
      patience.look_s(knob),
    )
    for knob in (1.0, 2.0)
  )
  assert twice == tuple(2 * seconds for seconds in once)


@pytest.mark.parametrize(
  'nbytes,s_per_byte,expected_s',
  [
    (10**6, None, 10.0),  # The floor.
    (10**9, None, 1000.0),  # Not measured: 1 MB/s.
    (10**9, 1e-8, 80.0),  # 100 MB/s: 8 times 10 s.
  ],
)
def test_transfers(nbytes, s_per_byte, expected_s):
  found = patience.transfer_max_s(nbytes, Ema(s_per_byte), patience=1.0)
  assert found == pytest.approx(expected_s)


def _cluster(step_s: float, overlap_steps: int) -> Cluster:
  """Three learners; their steps vary by 30 %, one in fifty takes 3 times."""
  config = config_of(
    {
      'fragments': 1,
      'sync_every_steps': 8,
      'overlap_steps': overlap_steps,
      'quorum': 3,
      'patience': 1.0,
      'total_steps': 10**6,
    }
  )
  timing = Timing(
    {0: step_s, 1: step_s, 2: 2 * step_s}, jitter=0.3, slow_share=0.02
  )
  cluster = Cluster(config, timing, seed=1, watch=Log())
  for learner in range(3):
    cluster.start(learner)
  return cluster


def _left(cluster: Cluster) -> list[tuple[float, int, str]]:
  return [
    (at_s, record.learner, record.reason)
    for at_s, record in cluster.watch.records
    if record.kind == 'left'
  ]


@pytest.mark.parametrize('overlap_steps', [0, 6])
@pytest.mark.parametrize('step_s', [0.01, 1.0, 60.0])
def test_the_live_are_kept_and_the_silent_found_out(step_s, overlap_steps):
  cluster = _cluster(step_s, overlap_steps)
  cluster.run(STEPS * step_s)
  assert not _left(cluster)

  stopped_s = cluster.sim.now
  cluster.stop(0)
  # ξ_step is an average of steps that vary; twice the mean is beyond it. The
  # learner's last message may have been sent a step before, or take a second.
  bound_s = max(10.0, 6 * 2 * step_s) + patience.look_s(1.0)
  cluster.run(stopped_s + bound_s)
  ((found_s, learner, reason),) = _left(cluster)
  assert learner == 0 and reason.startswith('silent')
  # Not before its steps could have taken so long.
  assert found_s - stopped_s >= max(10.0, 6 * 0.5 * step_s) - 3 * step_s - 1.0
