# SPDX-License-Identifier: Apache-2.0
"""Learners of unequal speed under different quorums (the paper's Table 5)."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence

from diloco.config.simulation import SimulationConfig
from diloco.fleets import fleet, synchronous
from diloco.fleets.failures import FaultEvents
from diloco.fleets.fleet import FleetResult
from diloco.fleets.speeds import Speeds
from diloco.metrics.run_progress import counted
from diloco.pages.parts import (
  Cell,
  Chart,
  Column,
  Line,
  ReportPage,
  Table,
  Timeline,
)
from diloco.protocol.config import ProtocolConfig
from diloco.studies import inputs, lanes

LOCKSTEP = 'streaming DiLoCo'  # A row for comparison: one program, M groups.
COLUMNS = (
  Column('setting'),
  Column('pace %', spread='pace spread'),
  Column('pace spread', hidden=True),
  Column('closed form', 0),
  Column('paper', 0),
  Column('stepping %'),
  Column('merged fast %', 0),
  Column('merged slow %', 0),
  Column('merged %', 0, spread='merged spread'),
  Column('merged spread', hidden=True),
  Column('staleness', 2),
  Column('rounds per hour', 0),
  Column('grace s', 2),
)


# The runs of the study of learners of unequal speed.


def protocol_of(setting: str, config: ProtocolConfig) -> ProtocolConfig:
  """The protocol of one setting.

  Args:
    setting: of `HeterogeneousStudy.SETTINGS`: a quorum, then what it has. The
      grace window is the configured one, or none; admission is the paper's,
      'fresh', unless 'latest' stands there.
  """
  quorum, *has = setting.split()
  return dataclasses.replace(
    config,
    quorum=config.learners if quorum == 'K=M' else 1,
    grace_cap_steps=config.grace_cap_steps if 'grace' in has else 0.0,
    admission='latest' if 'latest' in has else 'fresh',
  )


def fast(config: SimulationConfig) -> range:
  return range(config.protocol.learners - config.fleet.slow_learners)


def slow(config: SimulationConfig) -> range:
  return range(fast(config).stop, config.protocol.learners)


def run(config: SimulationConfig, setting: str, i: int) -> fleet.FleetResult:
  """The i-th run of a setting; the first keeps what a timeline shows."""
  return fleet.run(
    protocol_of(setting, config.protocol),
    inputs.fleet_of(config, config.protocol.learners),
    inputs.network_of(config),
    FaultEvents(),
    config.seed + i,
    until_s=config.study.steps * config.fleet.step_s,
    timeline_s=config.study.timeline_s if i == 0 else 0.0,
  )


def run_in_lockstep(
  config: SimulationConfig, i: int
) -> synchronous.SynchronousResult:
  """Streaming DiLoCo on the same fleet: one program, M groups."""
  fleet, groups = config.fleet, config.protocol.learners
  steps_s = inputs.fleet_of(config, groups).step_s
  return synchronous.run(
    [()] * groups,
    [
      Speeds(
        step_s,
        fleet.jitter,
        fleet.drift,
        random.Random(f'steps of {group}, seed {config.seed + i}'),
      )
      for group, step_s in enumerate(steps_s)
    ],
    config.study.steps * fleet.step_s,
    inputs.exchange_of(config, True, groups),
  )


def report(config: SimulationConfig, say: Callable[[str], None]) -> ReportPage:
  """Runs every setting with every seed."""
  study = config.study
  runs = list(itertools.product(study.settings, range(study.seeds)))
  outcomes = {}
  for setting, i in counted(runs, say, lambda run: f'{run[0]}, seed {run[1]}'):
    outcomes.setdefault(setting, []).append(run(config, setting, i))
  waiting = [run_in_lockstep(config, i) for i in range(study.seeds)]  # Cheap.
  return ReportPage(
    name=config.name,
    title='Learners of unequal speed: what quorum, grace and admission do',
    command='python -m diloco.simulate --config=experiments/heterogeneous.py',
    paragraphs=_paragraphs(config),
    parts=(
      _table(config, outcomes, waiting),
      _chart(outcomes),
      *_timelines(config, outcomes),
    ),
  )


def _table(
  config: SimulationConfig,
  outcomes: dict,
  waiting: list[synchronous.SynchronousResult],
) -> Table:
  rows = []
  for setting, several in outcomes.items():
    paces = [100 * outcome.pace for outcome in several]
    merged = [_merged(outcome, outcome.learners) for outcome in several]
    rows.append(
      (
        setting,
        inputs.mean(paces),
        inputs.spread(paces),
        _even_pace(config, setting),
        inputs.HETEROGENEOUS.get(setting),
        inputs.mean([100 * outcome.goodput for outcome in several]),
        _mean_merged(several, fast(config)),
        _mean_merged(several, slow(config)),
        inputs.mean(merged),
        inputs.spread(merged),
        inputs.mean([_staleness(outcome) for outcome in several]),
        inputs.mean([outcome.merges_per_hour for outcome in several]),
        inputs.mean([outcome.grace_s for outcome in several]),
      )
    )
  rows.append(_lockstep_row(config, waiting))
  return Table(
    'heterogeneous',
    'Settings of the protocol',
    COLUMNS,
    tuple(rows),
    notes=(
      'pace: rounds closed, of those that the steps of the fastest learner '
      'make due; what Table 5 of the paper calls goodput. Above 100 where '
      'several learners take turns at being the fastest.',
      'closed form: the pace if all steps of a learner were equally long: that '
      'of the K-th fastest, or of the slowest where all wait for it.',
      'stepping: share of the allocated time in steps; nobody waits at any K.',
      f'{LOCKSTEP}: one program in lock-step, everybody waits for the slowest; '
      'pace relative to a fastest learner that did not.',
      'merged: participation, the share of the rounds that took a learner in; '
      'of the fast ones, of the slow ones, of all. Where rounds follow the '
      'fast ones, a slow one makes a step for '
      f'{1 - config.fleet.slow_gap:.0%} of them.',
      'staleness: versions that the base of a merged offer was behind, mean.',
      inputs.said(config.study.seeds),
    ),
  )


def _lockstep_row(
  config: SimulationConfig, waiting: list[synchronous.SynchronousResult]
) -> tuple[Cell, ...]:
  """All take part in every round, and wait for it."""
  protocol = config.protocol
  steps_s = inputs.fleet_of(config, protocol.learners).step_s
  steps = [min(group.steps for group in o.groups) for o in waiting]
  due = config.study.steps * config.fleet.step_s / min(steps_s)
  paces = [100 * made / due for made in steps]
  rounds_per_s = (
    inputs.mean([made / o.until_s for made, o in zip(steps, waiting)])
    / protocol.spacing_steps
  )
  return (
    LOCKSTEP,
    inputs.mean(paces),
    inputs.spread(paces),
    100 * min(steps_s) / max(steps_s),
    None,
    inputs.mean([100 * outcome.goodput for outcome in waiting]),
    100.0 if fast(config) else None,
    100.0 if slow(config) else None,
    100.0,
    None,
    0.0,
    3600 * rounds_per_s,
    None,
  )


def _chart(outcomes: dict) -> Chart:
  """Each setting as a point: how fast rounds close, and with how many."""
  lines = []
  for group, (setting, several) in enumerate(outcomes.items()):
    paces = [100 * outcome.pace for outcome in several]
    merged = [_merged(outcome, outcome.learners) for outcome in several]
    lines.append(
      Line(
        setting,
        'simulated',
        (inputs.mean(merged),),
        (inputs.mean(paces),),
        (inputs.spread(paces) or 0.0,),
        group,
      )
    )
  return Chart(
    'pace_and_participation',
    'Pace against participation',
    'participation (% of learners merged in a round)',
    'pace (% of the fastest learner)',
    tuple(lines),
    x_range=(0.0, 105.0),
    y_range=(60.0, 105.0),
    notes=(
      'Best is the upper right corner: nobody waits, nobody is left out.',
    ),
  )


def _timelines(config: SimulationConfig, outcomes: dict) -> list[Timeline]:
  fast_learners = fast(config)
  names = [
    f'learner {m}' if m in fast_learners else f'learner {m}, slow'
    for m in range(config.protocol.learners)
  ]
  until_s = min(
    config.study.timeline_s, config.study.steps * config.fleet.step_s
  )
  return [
    lanes.timeline(
      'timeline_' + setting.lower().replace('=', '').replace(' ', '_'),
      f'{setting}: the first {until_s:.0f} s',
      several[0],
      names,
      until_s,
      notes=(f'Seed {config.seed}.',),
    )
    for setting, several in outcomes.items()
  ]


def _paragraphs(config: SimulationConfig) -> tuple[str, ...]:
  fleet, protocol = config.fleet, config.protocol
  return (
    f'{protocol.learners} learners, of which {fleet.slow_learners} are '
    f'{fleet.slow_gap:.0%} slower; the length of a step varies by '
    f'{fleet.jitter:.0%} (standard deviation). P = {protocol.fragments}, '
    f'H = {protocol.sync_every_steps}, τ = {protocol.overlap_steps}, '
    f'{config.study.steps} steps of {fleet.step_s:g} s.',
    'The syncer and the learners are the state machines of a real run, under '
    'a simulated clock. K=M waits for everybody at every round, K=1 for '
    'nobody. A grace window is time that nobody waits for. Admission is '
    "'fresh' (only who has made this round's step, the paper's reading) unless "
    "'latest' stands there (the newest offer of everybody).",
  )


def _even_pace(config: SimulationConfig, setting: str) -> float:
  """The K-th fastest learner's speed in % of the fastest's, without jitter."""
  quorum = protocol_of(setting, config.protocol).quorum
  fleet = inputs.fleet_of(config, config.protocol.learners)
  steps_s = sorted(fleet.step_s)
  return 100 * steps_s[0] / steps_s[quorum - 1]


def _mean_merged(
  several: Sequence[FleetResult], learners: Sequence[int]
) -> float | None:
  """Returns the mean participation; None if there are no such learners."""
  if not learners:
    return None
  return inputs.mean([_merged(outcome, learners) for outcome in several])


def _merged(outcome: FleetResult, learners: Sequence[int]) -> float:
  """Mean participation of some learners, in %."""
  return inputs.mean([100 * outcome.participation(m) for m in learners])


def _staleness(outcome: FleetResult) -> float:
  """Mean over everything that was merged."""
  counts = outcome.learners.values()
  merged = sum(count.merged for count in counts)
  return sum(count.staleness for count in counts) / merged if merged else 0.0
