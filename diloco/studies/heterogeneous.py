# SPDX-License-Identifier: Apache-2.0
"""Learners of unequal speed under different quorums (paper §7, Table 5)."""

import dataclasses
from collections.abc import Callable, Sequence

from diloco.pages.parts import Chart, Column, Line, Report, Table, Timeline
from diloco.protocol.config import ProtocolConfig
from diloco.sim import decoupled
from diloco.sim.decoupled import Outcome
from diloco.sim.happenings import Happenings
from diloco.simulation_config import SimulationConfig
from diloco.studies import lanes, machines, samples

# Goodput in Table 5: rounds closed, of those that full speed makes due.
PAPER = {'K=M': 84.0, 'K=1': 100.0, 'K=1 grace': 100.0}

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


def report(config: SimulationConfig, say: Callable[[str], None]) -> Report:
  """Runs every setting with every seed."""
  study = config.study
  outcomes = {}
  for setting in study.settings:
    for i in range(study.seeds):
      say(f'{setting}: run {i + 1} of {study.seeds}')
      outcomes.setdefault(setting, []).append(_run(config, setting, i))
  return Report(
    name=config.name,
    title='Learners of unequal speed: what quorum, grace and admission do',
    command='python -m diloco.simulate --config=experiments/heterogeneous.py',
    paragraphs=_paragraphs(config),
    parts=(
      _table(config, outcomes),
      _chart(outcomes),
      *_timelines(config, outcomes),
    ),
  )


def protocol_of(setting: str, config: ProtocolConfig) -> ProtocolConfig:
  """The protocol of one setting.

  Args:
    setting: of `HeterogeneousStudy.SETTINGS`: a quorum, then what it has. The
      grace window is the configured one, or none; admission is the paper's,
      'fresh', unless 'latest' stands there.
    config: of everything else.
  """
  quorum, *has = setting.split()
  return dataclasses.replace(
    config,
    quorum=config.learners if quorum == 'K=M' else 1,
    grace_cap_steps=config.grace_cap_steps if 'grace' in has else 0.0,
    admission='latest' if 'latest' in has else 'fresh',
  )


def _run(config: SimulationConfig, setting: str, i: int) -> Outcome:
  return decoupled.run(
    protocol_of(setting, config.protocol),
    machines.fleet_of(config, config.protocol.learners),
    machines.network_of(config),
    Happenings(),
    config.seed + i,
    until_s=config.study.steps * config.fleet.step_s,
    timeline_s=config.study.timeline_s if i == 0 else 0.0,
  )


def _table(config: SimulationConfig, outcomes: dict) -> Table:
  rows = []
  for setting, several in outcomes.items():
    paces = [100 * outcome.pace for outcome in several]
    merged = [_merged(outcome, outcome.learners) for outcome in several]
    rows.append(
      (
        setting,
        samples.mean(paces),
        samples.spread(paces),
        _even_pace(config, setting),
        PAPER.get(setting),
        samples.mean([100 * outcome.goodput for outcome in several]),
        _mean_merged(several, _fast(config)),
        _mean_merged(several, _slow(config)),
        samples.mean(merged),
        samples.spread(merged),
        samples.mean([_staleness(outcome) for outcome in several]),
        samples.mean([outcome.merges_per_hour for outcome in several]),
        samples.mean([outcome.grace_s for outcome in several]),
      )
    )
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
      'of the K-th fastest.',
      'stepping: share of the allocated time in steps; nobody waits at any K.',
      'merged: participation, the share of the rounds that took a learner in; '
      'of the fast ones, of the slow ones, of all. Where rounds follow the '
      'fast ones, a slow one makes a step for '
      f'{1 - config.fleet.slow_gap:.0%} of them.',
      'staleness: versions that the base of a merged offer was behind, mean.',
      samples.said(config.study.seeds),
    ),
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
        (samples.mean(merged),),
        (samples.mean(paces),),
        (samples.spread(paces) or 0.0,),
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
  fast = _fast(config)
  names = [
    f'learner {m}' if m in fast else f'learner {m}, slow'
    for m in range(config.protocol.learners)
  ]
  until_s = min(
    config.study.timeline_s, config.study.steps * config.fleet.step_s
  )
  return [
    lanes.timeline(
      'timeline_' + setting.lower().replace('=', '').replace(' ', '_'),
      f'{setting}: the first {until_s:.0f} s',
      several[0].tally,
      names,
      until_s,
      notes=(f'Seed {config.seed}. A mark: a round took the learner in.',),
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
  fleet = machines.fleet_of(config, config.protocol.learners)
  steps_s = sorted(fleet.step_s)
  return 100 * steps_s[0] / steps_s[quorum - 1]


def _fast(config: SimulationConfig) -> range:
  return range(config.protocol.learners - config.fleet.slow_learners)


def _slow(config: SimulationConfig) -> range:
  return range(_fast(config).stop, config.protocol.learners)


def _mean_merged(
  several: Sequence[Outcome], learners: Sequence[int]
) -> float | None:
  """None where there are no such learners."""
  if not learners:
    return None
  return samples.mean([_merged(outcome, learners) for outcome in several])


def _merged(outcome: Outcome, learners: Sequence[int]) -> float:
  """Mean participation of some learners, in %."""
  return samples.mean([100 * outcome.participation(m) for m in learners])


def _staleness(outcome: Outcome) -> float:
  """Mean over everything that was merged."""
  counts = outcome.learners.values()
  merged = sum(count.merged for count in counts)
  return sum(count.staleness for count in counts) / merged if merged else 0.0
