# SPDX-License-Identifier: Apache-2.0
"""Learners of unequal speed under different quorums (the paper's Table 5)."""

from collections.abc import Callable, Sequence

from diloco.pages.parts import (
  Cell,
  Chart,
  Column,
  Line,
  Report,
  Table,
  Timeline,
)
from diloco.sim import lockstep
from diloco.sim.decoupled import Outcome
from diloco.simulation_config import SimulationConfig
from diloco.studies import heterogeneous_runs as runs
from diloco.studies import lanes, machines, paper, samples

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


def report(config: SimulationConfig, say: Callable[[str], None]) -> Report:
  """Runs every setting with every seed."""
  study = config.study
  outcomes = {}
  for setting in study.settings:
    for i in range(study.seeds):
      say(f'{setting}: run {i + 1} of {study.seeds}')
      outcomes.setdefault(setting, []).append(runs.run(config, setting, i))
  say(f'{LOCKSTEP}: {study.seeds} runs')
  waiting = [runs.run_in_lockstep(config, i) for i in range(study.seeds)]
  return Report(
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
  config: SimulationConfig, outcomes: dict, waiting: list[lockstep.Outcome]
) -> Table:
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
        paper.HETEROGENEOUS.get(setting),
        samples.mean([100 * outcome.goodput for outcome in several]),
        _mean_merged(several, runs.fast(config)),
        _mean_merged(several, runs.slow(config)),
        samples.mean(merged),
        samples.spread(merged),
        samples.mean([_staleness(outcome) for outcome in several]),
        samples.mean([outcome.merges_per_hour for outcome in several]),
        samples.mean([outcome.grace_s for outcome in several]),
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
      samples.said(config.study.seeds),
    ),
  )


def _lockstep_row(
  config: SimulationConfig, waiting: list[lockstep.Outcome]
) -> tuple[Cell, ...]:
  """All take part in every round, and wait for it."""
  protocol = config.protocol
  steps_s = machines.fleet_of(config, protocol.learners).step_s
  steps = [min(group.steps for group in o.groups) for o in waiting]
  due = config.study.steps * config.fleet.step_s / min(steps_s)
  paces = [100 * made / due for made in steps]
  rounds_per_s = (
    samples.mean([made / o.until_s for made, o in zip(steps, waiting)])
    / protocol.spacing_steps
  )
  return (
    LOCKSTEP,
    samples.mean(paces),
    samples.spread(paces),
    100 * min(steps_s) / max(steps_s),
    None,
    samples.mean([100 * outcome.goodput for outcome in waiting]),
    100.0 if runs.fast(config) else None,
    100.0 if runs.slow(config) else None,
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
  fast = runs.fast(config)
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
  quorum = runs.protocol_of(setting, config.protocol).quorum
  fleet = machines.fleet_of(config, config.protocol.learners)
  steps_s = sorted(fleet.step_s)
  return 100 * steps_s[0] / steps_s[quorum - 1]


def _mean_merged(
  several: Sequence[Outcome], learners: Sequence[int]
) -> float | None:
  """Returns the mean participation; None if there are no such learners."""
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
