# SPDX-License-Identifier: Apache-2.0
"""Measures what the others notice of a `kill -9`, and how soon it is back.

Two learners of real processes; steps are slept out. More faults, phase by
phase, are in `tests.chaos.fault_benchmark`.
"""

import itertools
import statistics
import time

from diloco.bench.measurement import BenchFigure, BenchSettings
from diloco.bench.real_run import SYNCER, RealRun, column
from diloco.metrics import names
from diloco.metrics.workdir import learner_name

FLOOR_S = 0.05
OVERRIDES = {
  'protocol.fragments': 4,
  'protocol.sync_every_steps': 8,
  'protocol.overlap_steps': 2,
  'run.step_floor_s': FLOOR_S,
}
VICTIM, SURVIVOR = 1, 0


def _warm_up(run: RealRun, settings: BenchSettings) -> float:
  """Starts all, lets them train; returns when the quiet span began."""
  run.start_syncer()
  for m in (SURVIVOR, VICTIM):
    run.start_learner(m)
  for m in (SURVIVOR, VICTIM):
    run.until_merged(m, settings.pick(8, 2))
  quiet_s = time.time()
  run.until_steps(SURVIVOR, settings.pick(120, 20))
  return quiet_s


def measure_learner_killed(settings: BenchSettings) -> list[BenchFigure]:
  """Measures the survivor's longest step gap, and the respawn."""
  with RealRun(OVERRIDES) as run:
    quiet_s = _warm_up(run, settings)
    victim = learner_name(VICTIM)
    first_s = run.closes(VICTIM)[0]['time_s'] - run.started_s[victim]
    killed_s = run.kill(victim)
    run.until_steps(SURVIVOR, settings.pick(60, 5))
    run.start_learner(VICTIM)
    started_s = run.started_s[victim]
    run.until_merged(VICTIM, 1, started_s)
    run.until_steps(SURVIVOR, settings.pick(60, 5))
    times_s = column(run.steps(SURVIVOR), names.TIME)
    merged_s = next(
      close['time_s']
      for close in run.closes(VICTIM)
      if close['time_s'] >= started_s
    )
  before_s = longest_gap_s(times_s, quiet_s, killed_s)
  found = [
    BenchFigure(
      f'survivor, longest step gap, {when}', 1e3 * gap_s, 'ms',
      gap_s / before_s, 'its longest before the kill',
    )
    for when, gap_s in (
      ('victim away', longest_gap_s(times_s, killed_s, started_s)),
      ('victim starts', longest_gap_s(times_s, started_s, merged_s)),
    )
  ]  # fmt: skip
  respawn_s = merged_s - started_s
  return [
    *found,
    BenchFigure(
      'respawn to first contribution', respawn_s, 's', respawn_s / first_s,
      'its first start',
    ),
  ]  # fmt: skip


def measure_syncer_killed(settings: BenchSettings) -> list[BenchFigure]:
  """Measures the time from "listens" to the first merge, and the steps."""
  with RealRun(OVERRIDES) as run:
    quiet_s = _warm_up(run, settings)
    killed_s = run.kill(SYNCER)
    run.until_steps(SURVIVOR, settings.pick(60, 5))
    listens_s = run.start_syncer()

    def merges() -> list[float]:
      times_s = (close['time_s'] for close in run.closes())
      return [t for t in times_s if t >= run.started_s[SYNCER]]

    run.until(merges, 'a round closes after the restart')
    merged_s = merges()[0]
    run.until_steps(SURVIVOR, 5)
    times_s = column(run.steps(SURVIVOR), names.TIME)
    closes_s = [
      close['time_s']
      for close in run.closes()
      if quiet_s <= close['time_s'] < killed_s
    ]
  between_s = statistics.median(b - a for a, b in itertools.pairwise(closes_s))
  back_s = max(merged_s - listens_s, 0.0)
  gap_s = longest_gap_s(times_s, killed_s, listens_s)
  before_s = longest_gap_s(times_s, quiet_s, killed_s)
  return [
    BenchFigure(
      'syncer listens to first merge', back_s, 's', back_s / between_s,
      'the time between two rounds',
    ),
    BenchFigure(
      'longest step gap without a syncer', 1e3 * gap_s, 'ms',
      gap_s / before_s, 'the longest before the kill',
    ),
  ]  # fmt: skip


def longest_gap_s(times_s: list[float], begin_s: float, end_s: float) -> float:
  """Returns the longest time between two steps that touches the span."""
  gaps = [
    b - a for a, b in itertools.pairwise(times_s) if b > begin_s and a < end_s
  ]
  return max(gaps, default=end_s - begin_s)
