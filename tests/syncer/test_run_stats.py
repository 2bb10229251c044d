# SPDX-License-Identifier: Apache-2.0
"""Counts of a run go on after a restart of the syncer."""

import json
import time

import pytest

from diloco.protocol import messages
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer.state import Ledger
from diloco.protocol.values import Ema
from diloco.syncer.stats import RunStats

pytestmark = pytest.mark.beside

STEP_S = 0.5


class Clock:
  """Stands in for both clocks; they differ, as after a reboot."""

  def __init__(self, monkeypatch):
    self.now_s, self.offset_s = 100.0, 1e9
    monkeypatch.setattr(time, 'monotonic', lambda: self.now_s)
    monkeypatch.setattr(time, 'time', lambda: self.now_s + self.offset_s)

  def reboot(self, away_s: float):
    self.offset_s += self.now_s + away_s
    self.now_s = 0.0


def train(stats: RunStats, clock: Clock, steps: int):
  for step in range(1, steps + 1):
    clock.now_s += STEP_S
    report = messages.Report(step, 1, step, STEP_S, 0.0, 1.0, ())
    stats.note_event(syncer_events.Heard(0, 1, report))


def _ledger(versions: int) -> Ledger:
  return Ledger(
    1, (), 1, (1,) * versions, (), Ema(), Ema(), (None,) * versions, None, False
  )


def close(stats: RunStats, round_: int):
  closed = syncer_events.Publish(round_, 0, 1, 1, (), (), (), 0.0)
  stats.note_publish(closed)


def test_uptime_and_wall_time_go_on_after_a_restart(small_run, monkeypatch):
  clock = Clock(monkeypatch)
  ready = syncer_events.LogDecision('ready', 0, 'the seed')
  first = RunStats(small_run.config)
  first.note_effect(ready, 0.0)
  train(first, clock, 20)  # 10 s,
  clock.now_s += 10.0  # and as long without a step.
  close(first, 1)
  assert first.status(finished=False).uptime == pytest.approx(0.5)
  counts = json.loads(json.dumps(first.counts()))

  clock.reboot(away_s=5.0)
  second = RunStats(small_run.config)
  second.resume(_ledger(small_run.config.protocol.fragments), counts)
  assert second.status(finished=False).uptime == pytest.approx(0.5)
  second.note_effect(ready, 0.0)
  train(second, clock, 40)  # 20 s.
  close(second, 2)
  clock.now_s += 30.0  # The result is written.
  summary = second.status(finished=True)
  assert summary.uptime == pytest.approx(30 / 40)
  assert summary.elapsed_s == pytest.approx(20 + 5 + 20)


def test_a_round_that_is_closed_again_counts_once(small_run):
  """A syncer that is killed goes on from its ledger, which has its counts."""
  config = small_run.config

  def merge(stats: RunStats, round_: int):
    share = syncer_events.Share(
      learner=0, incarnation=1, handle=1, base_version=0, step=1, c_tokens=1,
      c_steps=1, weight=1.0, age_s=0.0, age_steps=0.0,
    )  # fmt: skip
    closed = syncer_events.Publish(round_, 0, 1, 1, (share,), (), (), 0.0)
    stats.note_publish(closed)

  first = RunStats(config)
  merge(first, 1)
  counts = json.loads(json.dumps(first.counts()))
  merge(first, 2)  # The ledger does not have it.
  second = RunStats(config)
  second.resume(_ledger(config.protocol.fragments), counts)
  merge(second, 2)
  (learner,) = second.status(finished=False).learners
  assert (learner.rounds, learner.participation) == (2, 1.0)
