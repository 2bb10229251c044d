# SPDX-License-Identifier: Apache-2.0
"""Faults given to a running run one by one, and the figures of each.

Every scenario returns figures by name, in seconds, shares and counts; a name
that ends in '/learner-N' is of one learner, the others are of the worst of
those that the fault did not hit.
"""

import dataclasses
import itertools
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from diloco.metrics.goodput import StepRecord, stepping
from diloco.metrics.workdir import learner_name
from launch.chaos import run_checks
from launch.chaos.live_run import LiveRun, WrittenStep
from launch.program import SYNCER

AWAY_S = 5.0  # From a kill to the restart.
STOPPED_S = 8.0  # From SIGSTOP to SIGCONT.
READY_S = 180.0  # Until a process that starts does its part.

NO_FAULT = 'no fault'
LEARNER_KILLED = 'learner killed'
SYNCER_KILLED = 'syncer killed'
LEARNER_STOPPED = 'learner stopped'
SCENARIOS = (NO_FAULT, LEARNER_KILLED, SYNCER_KILLED, LEARNER_STOPPED)

Measured = dict[str, float]
Spans = Mapping[str, tuple[float, float]]  # Phase -> start, end.


@dataclasses.dataclass(frozen=True)
class Figures:
  """The statistics of one learner over one span of time."""

  steps: int
  steps_per_s: float
  goodput: float  # Of the span; it does not die, so all its steps count.
  stall_max_s: float  # As the learner reports it, step by step.
  stall_p99_s: float
  excess_max_s: float  # Longest time between two steps, beyond the floor.


def figures(
  steps: Sequence[WrittenStep], start_s: float, end_s: float, floor_s: float
) -> Figures:
  """Computes the statistics of one learner.

  Args:
    steps: all of them, in order, also outside of the span.
    start_s: seconds since the epoch, as `WrittenStep.time_s`.
    end_s: later than that.
    floor_s: minimum duration of a step.
  """
  assert end_s > start_s, f'an empty span: {start_s=} {end_s=}'
  inside = [s for s in steps if start_s <= s.time_s <= end_s]
  stalls_s = sorted(s.stall_s for s in inside)
  records = [
    StepRecord(0, s.time_s, s.step_s, min(s.stall_s, s.step_s)) for s in steps
  ]
  return Figures(
    steps=len(inside),
    steps_per_s=len(inside) / (end_s - start_s),
    goodput=stepping(records, 1, start_s, end_s),
    stall_max_s=stalls_s[-1] if stalls_s else end_s - start_s,
    stall_p99_s=_percentile(stalls_s, 99) if stalls_s else end_s - start_s,
    excess_max_s=_longest_gap_s(steps, start_s, end_s) - floor_s,
  )


def _longest_gap_s(
  steps: Sequence[WrittenStep], start_s: float, end_s: float
) -> float:
  """Between two steps, of which one at least or all the time is inside.

  By the times at which they were written, whatever the learner says of stalls.
  A gap that is open at the end of what is known counts up to `end_s`.
  """
  times_s = [s.time_s for s in steps]
  before = [t for t in times_s if t < start_s][-1:] or [start_s]
  after = [t for t in times_s if t > end_s][:1] or [end_s]
  inside = [t for t in times_s if start_s <= t <= end_s]
  marks = [*before, *inside, *after]
  return max(b - a for a, b in itertools.pairwise(marks))


def _percentile(ascending: Sequence[float], percent: float) -> float:
  """The smallest value that `percent` of them do not exceed."""
  rank = math.ceil(len(ascending) * percent / 100)
  return ascending[max(rank, 1) - 1]


def no_fault(run: LiveRun, seconds: float) -> Measured:
  """Measures `seconds` without a fault."""
  start_s = time.time()
  run.spend(seconds)
  end_s = time.time()
  return {
    **_measured(run, list(run.learners), {'during': (start_s, end_s)}),
    'merge_gap_max_s': _longest_merge_gap_s(run, start_s, end_s),
  }


def learner_killed(run: LiveRun, victim: int, seconds: float) -> Measured:
  """Kills a learner with `kill -9` and restarts it `AWAY_S` later."""
  before_s = time.time()
  run.spend(seconds)
  killed_s = _kill(run, learner_name(victim))
  restarted_s = _restarted(run, learner_name(victim))
  run.until(
    lambda: (
      _records(run, 'ready', victim, restarted_s)
      and run.merges(restarted_s, victim)
    ),
    READY_S,
    f'learner {victim} is ready and merged after its restart',
  )
  merged_s = run.merges(restarted_s, victim)[0]['time_s']
  ready_s = _records(run, 'ready', victim, restarted_s)[0]['time_s']
  run.spend(seconds)
  spans = {
    'before': (before_s, killed_s),
    'during': (killed_s, restarted_s),
    'starting': (restarted_s, merged_s),
    'after': (merged_s, time.time()),
  }
  return {
    **_measured(run, [m for m in run.learners if m != victim], spans),
    'fault_to_merge_s': _next_merge_s(run, killed_s) - killed_s,
    'merge_gap_max_s': _longest_merge_gap_s(run, *spans['during']),
    'restart_to_ready_s': ready_s - restarted_s,
    'restart_to_merged_s': merged_s - restarted_s,
    'ready_to_merged_s': merged_s - ready_s,
  }


def syncer_killed(run: LiveRun, seconds: float) -> Measured:
  """Kills the syncer with `kill -9` and restarts it `AWAY_S` later."""
  before_s = time.time()
  run.spend(seconds)
  killed_s = _kill(run, SYNCER)
  restarted_s = _restarted(run, SYNCER)
  run.until(lambda: _listens(run.address), READY_S, 'the syncer listens')
  listens_s = time.time()
  run.until(
    lambda: run.merges(listens_s), READY_S, 'a round closes after the restart'
  )
  merged_s = run.merges(listens_s)[0]['time_s']
  run.until(
    lambda: run.all_merge(listens_s), READY_S, 'every learner is merged again'
  )
  run.spend(seconds)
  spans = {
    'before': (before_s, killed_s),
    'during': (killed_s, restarted_s),
    'starting': (restarted_s, listens_s),
    'after': (listens_s, time.time()),
  }
  return {
    **_measured(run, list(run.learners), spans),
    'restart_to_listens_s': listens_s - restarted_s,
    'listens_to_merge_s': merged_s - listens_s,
    'listens_to_all_merged_s': _all_merged_s(run, listens_s) - listens_s,
    'versions_wrong': float(len(run_checks.versions(run.tape))),
  }


def learner_stopped(run: LiveRun, victim: int, seconds: float) -> Measured:
  """SIGSTOP for a learner, SIGCONT `STOPPED_S` later."""
  name = learner_name(victim)
  before_s = time.time()
  run.spend(seconds)
  stopped_s = time.time()
  run.supervisor.pause(name, 'by the benchmark')
  run.spend(STOPPED_S)
  went_on_s = time.time()
  run.supervisor.go_on(name, 'by the benchmark')
  run.until(
    lambda: run.merges(went_on_s, victim),
    READY_S,
    f'learner {victim} is merged after SIGCONT',
  )
  merged_s = run.merges(went_on_s, victim)[0]['time_s']
  run.spend(seconds)
  spans = {
    'before': (before_s, stopped_s),
    'during': (stopped_s, went_on_s),
    'after': (went_on_s, time.time()),
  }
  return {
    **_measured(run, [m for m in run.learners if m != victim], spans),
    'fault_to_merge_s': _next_merge_s(run, stopped_s) - stopped_s,
    'merge_gap_max_s': _longest_merge_gap_s(run, *spans['during']),
    'went_on_to_merged_s': merged_s - went_on_s,
  }


def _measured(run: LiveRun, learners: Sequence[int], spans: Spans) -> Measured:
  """Returns the learners' statistics for each phase, and for all after
  'before'.
  """
  # The step that a span ends in is known only when it is over.
  run.spend(1.0)
  floor_s = run.config.run.step_floor_s
  of = {
    (m, phase): figures(run.steps[m], *span, floor_s)
    for m in learners
    for phase, span in spans.items()
  }

  def over(phase: str, field: str, pick: Callable) -> float:
    return pick(getattr(of[m, phase], field) for m in learners)

  measured = {}
  for phase in spans:
    measured |= {
      f'goodput_{phase}': over(phase, 'goodput', min),
      f'steps_per_s_{phase}': over(phase, 'steps_per_s', min),
      f'stall_max_s_{phase}': over(phase, 'stall_max_s', max),
      f'excess_max_s_{phase}': over(phase, 'excess_max_s', max),
    }
  if 'before' in spans:
    for phase in ('during', 'after'):
      measured |= {
        f'goodput_points_{phase}': _worst_change(
          of, learners, phase, lambda now, before: now.goodput - before.goodput
        ),
        f'pace_points_{phase}': _worst_change(
          of,
          learners,
          phase,
          lambda now, before: now.steps_per_s / before.steps_per_s - 1,
        ),
      }
  start_s = min(s for phase, (s, _) in spans.items() if phase != 'before')
  end_s = max(end for _, end in spans.values())
  for m in learners:
    whole = figures(run.steps[m], start_s, end_s, floor_s)
    measured[f'stall_max_s/{learner_name(m)}'] = whole.stall_max_s
    measured[f'stall_p99_s/{learner_name(m)}'] = whole.stall_p99_s
    measured[f'excess_max_s/{learner_name(m)}'] = whole.excess_max_s
  return measured


def _worst_change(
  of: Mapping[tuple[int, str], Figures],
  learners: Sequence[int],
  phase: str,
  change: Callable[[Figures, Figures], float],
) -> float:
  """The lowest change against 'before', in points."""
  return 100 * min(change(of[m, phase], of[m, 'before']) for m in learners)


def _kill(run: LiveRun, name: str) -> float:
  killed_s = time.time()
  run.supervisor.kill(name, 'by the benchmark')
  return killed_s


def _restarted(run: LiveRun, name: str) -> float:
  """Waits until a process that was killed is started; returns when."""
  starts = [e for e in run.events if (e.process, e.event) == (name, 'started')]
  run.until(
    lambda: _starts(run, name) > len(starts),
    AWAY_S + READY_S,
    f'{name} is started again',
  )
  return next(e.time_s for e in reversed(run.events) if e.process == name)


def _starts(run: LiveRun, name: str) -> int:
  return sum((e.process, e.event) == (name, 'started') for e in run.events)


def _records(
  run: LiveRun, kind: str, learner: int, since_s: float
) -> list[dict]:
  """Returns the tape's records of one learner since a time."""
  return [
    line
    for line in run.tape
    if line['kind'] == kind
    and line['time_s'] >= since_s
    and line['learner'] == learner
  ]


def _next_merge_s(run: LiveRun, since_s: float) -> float:
  """Returns when the next round closed; with a learner away it must have."""
  return run.merges(since_s)[0]['time_s']


def _longest_merge_gap_s(run: LiveRun, start_s: float, end_s: float) -> float:
  """The longest time without a close that ends, or is cut, in the span."""
  times_s = [line['time_s'] for line in run.merges(start_s)]
  marks = [start_s, *(t for t in times_s if t <= end_s), end_s]
  return max(b - a for a, b in itertools.pairwise(marks))


def _all_merged_s(run: LiveRun, since_s: float) -> float:
  return max(run.merges(since_s, m)[0]['time_s'] for m in run.learners)


def _listens(address: str) -> bool:
  """Returns True if a process accepts connections there."""
  host, _, port = address.rpartition(':')
  try:
    socket.create_connection((host.strip('[]'), int(port)), 0.2).close()
  except OSError:
    return False
  return True
