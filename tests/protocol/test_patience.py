# SPDX-License-Identifier: Apache-2.0
"""Time-outs: from what is measured, right for any step time without tuning."""

import pytest

from diloco.protocol import timeouts
from diloco.protocol.syncer.pulls import AwaitedPull, Waits
from diloco.protocol.timeouts import TransferTime
from diloco.protocol.values import Ema
from diloco.simulator.cluster import Cluster, Timing
from tests.protocol.cluster_stage import DecisionLog, config_of

STEPS = 500


@pytest.mark.parametrize(
  'step_s,expected_s', [(None, 10.0), (0.01, 10.0), (1.0, 10.0), (60.0, 360.0)]
)
def test_silence_is_a_floor_or_steps(step_s, expected_s):
  assert timeouts.silence_max_s(Ema(step_s), patience=1.0) == expected_s


@pytest.mark.parametrize(
  'patience,expected_s', [(0.01, 0.05), (0.1, 0.5), (0.2, 1.0), (60.0, 1.0)]
)
def test_a_learner_that_waits_is_heard_before_silence_ends_it(
  patience, expected_s
):
  assert timeouts.alive_s(patience) == expected_s
  assert timeouts.alive_s(patience) <= timeouts.silence_floor_s(patience) / 2


@pytest.mark.parametrize(
  'nbytes,took_s,expected_s',
  [
    (10**6, None, 10.0),  # The floor.
    (10**9, None, 1000.0),  # Not measured: 1 MB/s.
    (10**9, 10.0, 80.0),  # 100 MB/s: 8 times 10 s.
  ],
)
def test_transfers(nbytes, took_s, expected_s):
  found = timeouts.transfer_max_s(TransferTime(nbytes, took_s), nbytes, 1.0)
  assert found == pytest.approx(expected_s)


def test_latency_and_rate_are_told_apart_by_several_sizes():
  time = TransferTime()
  for nbytes in 20 * (1_000_000, 5_000_000, 2_000_000):
    time = time.add(nbytes, 0.5 + nbytes * 1e-6)
  for nbytes in (100_000, 3_000_000, 40_000_000):
    assert time.usual_s(nbytes) == pytest.approx(0.5 + nbytes * 1e-6, rel=0.01)


def test_what_was_given_up_has_twice_as_long_until_it_is_measured():
  time = TransferTime().add(1000, 0.5)
  limits_s = []
  for _ in range(3):
    limits_s.append(timeouts.pull_max_s(time, 1000, 1.0))
    time = timeouts.after_pull_failed(time, 1000, limits_s[-1], 1.0)
  assert limits_s == pytest.approx([2.0, 4.0, 8.0]) and time.failed
  time = time.add(1000, 9.0)
  assert not time.failed
  assert timeouts.pull_max_s(time, 1000, 1.0) == pytest.approx(36.0)


def test_a_hanging_path_is_not_waited_for_without_a_bound():
  time = TransferTime().add(1000, 0.05)
  for _ in range(100):
    waited_s = timeouts.pull_max_s(time, 1000, 1.0)
    time = timeouts.after_pull_failed(time, 1000, waited_s, 1.0)
  assert timeouts.pull_max_s(time, 1000, 1.0) == pytest.approx(60.0)


def test_who_is_not_waited_for():
  usual_s = {0: 0.1, 1: 0.1, 2: 0.1, 3: 1.0, 4: 0.1, 5: None}
  for missing, holds, at_all in (
    (2, True, True),
    (3, False, True),  # Ten times slower than the others.
    (4, False, False),  # Its last pull failed.
    (5, True, True),  # Nothing is known of it.
  ):
    waits = Waits()
    for learner, each_s in usual_s.items():
      late_at_s = 9.0 if learner == missing else None
      waits.put(learner, AwaitedPull(each_s, learner == 4, late_at_s))
    assert waits.go_on(may_hold=False) == holds, missing
    assert waits.go_on(may_hold=True) == at_all, missing


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
  cluster = Cluster(config, timing, seed=1, observer=DecisionLog())
  for learner in range(3):
    cluster.start(learner)
  return cluster


def _left(cluster: Cluster) -> list[tuple[float, int, str]]:
  return [
    (at_s, record.learner, record.reason)
    for at_s, record in cluster.observer.records
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
  bound_s = max(10.0, 6 * 2 * step_s) + timeouts.look_s(1.0)
  cluster.run(stopped_s + bound_s)
  ((found_s, learner, reason),) = _left(cluster)
  assert learner == 0 and reason.startswith('silent')
  # Not before its steps could have taken so long.
  assert found_s - stopped_s >= max(10.0, 6 * 0.5 * step_s) - 3 * step_s - 1.0
