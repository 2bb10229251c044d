# SPDX-License-Identifier: Apache-2.0
"""Learners of unequal speed under different quorums (the paper's Table 5)."""

import itertools
from collections.abc import Callable, Sequence

from diloco.config.simulation import SimulationConfig
from diloco.fleets import synchronous
from diloco.fleets.fleet import FleetResult
from diloco.metrics.run_progress import counted
from diloco.pages.parts import Chart, Line, ReportPage, Table
from diloco.protocol.config import ProtocolConfig
from diloco.studies import inputs, lanes, tables
from diloco.studies.tables import Field, Record

LOCKSTEP = 'streaming DiLoCo'  # A row for comparison: one program, M groups.
FIELDS = (
  Field('setting'),
  Field('pace %', 'pace', factor=100, spread=True),
  Field('closed form', digits=0),
  Field('paper', digits=0),
  Field('stepping %', 'goodput', factor=100),
  Field('merged fast %', 'merged_fast', 0, 100),
  Field('merged slow %', 'merged_slow', 0, 100),
  Field('merged %', 'participation', 0, 100, spread=True),
  Field('staleness', 'staleness', 2),
  Field('rounds per hour', 'merges_per_hour', 0),
  Field('grace s', 'grace_s', 2),
)


def protocol_of(setting: str, config: ProtocolConfig) -> dict[str, object]:
  """Returns what a setting changes in the protocol.

  Args:
    setting: of `HeterogeneousStudy.SETTINGS`: a quorum, then what it has. The
      grace window is the configured one, or none; admission is the paper's,
      'fresh', unless 'latest' stands there.
  """
  quorum, *has = setting.split()
  return {
    'quorum': config.learners if quorum == 'K=M' else 1,
    'grace_cap_steps': config.grace_cap_steps if 'grace' in has else 0.0,
    'admission': 'latest' if 'latest' in has else 'fresh',
  }


def fast(config: SimulationConfig) -> range:
  return range(config.protocol.learners - config.fleet.slow_learners)


def slow(config: SimulationConfig) -> range:
  return range(fast(config).stop, config.protocol.learners)


def run(config: SimulationConfig, setting: str, i: int) -> FleetResult:
  """The i-th run of a setting; the first keeps what a timeline shows."""
  return inputs.decoupled(
    config,
    config.seed + i,
    config.study.steps * config.fleet.step_s,
    timeline_s=config.study.timeline_s if i == 0 else 0.0,
    **protocol_of(setting, config.protocol),
  )


def record_of(config: SimulationConfig, outcome: FleetResult) -> Record:
  """Returns the figures of a run, with the share of rounds of either kind."""

  def merged(learners: Sequence[int]) -> float | None:
    if not learners:
      return None
    return sum(map(outcome.participation, learners)) / len(learners)

  return outcome.record() | {
    'merged_fast': merged(fast(config)),
    'merged_slow': merged(slow(config)),
  }


def run_in_lockstep(config: SimulationConfig, i: int) -> Record:
  """Streaming DiLoCo on the same fleet: all take part in every round."""
  protocol, groups = config.protocol, config.protocol.learners
  done = synchronous.run(
    [()] * groups,
    inputs.lockstep_speeds(config, groups, config.seed + i),
    config.study.steps * config.fleet.step_s,
    inputs.exchange_of(config, True, groups),
  )
  steps = min(group.steps for group in done.groups)
  fastest_s = min(inputs.fleet_of(config, groups).step_s)
  return {
    'pace': steps * fastest_s / done.until_s,
    'goodput': done.goodput,
    'merged_fast': 1.0 if fast(config) else None,
    'merged_slow': 1.0 if slow(config) else None,
    'participation': 1.0,
    'staleness': 0.0,
    'merges_per_hour': 3600 * steps / done.until_s / protocol.spacing_steps,
  }


def report(config: SimulationConfig, say: Callable[[str], None]) -> ReportPage:
  """Runs every setting with every seed."""
  study, fleet, protocol = config.study, config.fleet, config.protocol
  runs = list(itertools.product(study.settings, range(study.seeds)))
  outcomes: dict[str, list[FleetResult]] = {}
  for setting, i in counted(runs, say, lambda run: f'{run[0]}, seed {run[1]}'):
    outcomes.setdefault(setting, []).append(run(config, setting, i))
  records = {
    setting: [record_of(config, each) for each in several]
    for setting, several in outcomes.items()
  }
  names = [
    f'learner {m}' + (', slow' if m in slow(config) else '')
    for m in range(protocol.learners)
  ]
  until_s = min(study.timeline_s, study.steps * fleet.step_s)
  return ReportPage(
    name=config.name,
    title='Learners of unequal speed: what quorum, grace and admission do',
    command='python -m diloco.simulate --config=experiments/heterogeneous.py',
    paragraphs=(
      f'{protocol.learners} learners, of which {fleet.slow_learners} are '
      f'{fleet.slow_gap:.0%} slower; the length of a step varies by '
      f'{fleet.jitter:.0%} (standard deviation). P = {protocol.fragments}, '
      f'H = {protocol.sync_every_steps}, τ = {protocol.overlap_steps}, '
      f'{study.steps} steps of {fleet.step_s:g} s.',
      'The syncer and the learners are the state machines of a real run, under '
      'a simulated clock. K=M waits for everybody at every round, K=1 for '
      'nobody. A grace window is time that nobody waits for. Admission is '
      "'fresh' (only who has made this round's step, the paper's reading) "
      "unless 'latest' stands there (the newest offer of everybody).",
    ),
    parts=(
      _table(config, records),
      _chart(records),
      *(
        lanes.timeline(
          'timeline_' + setting.lower().replace('=', '').replace(' ', '_'),
          f'{setting}: the first {until_s:.0f} s',
          several[0],
          names,
          until_s,
          notes=(f'Seed {config.seed}.',),
        )
        for setting, several in outcomes.items()
      ),
    ),
  )


def _table(config: SimulationConfig, records: dict) -> Table:
  steps_s = sorted(inputs.fleet_of(config, config.protocol.learners).step_s)
  rows = []
  for setting, runs in records.items():
    quorum = protocol_of(setting, config.protocol)['quorum']
    labels = {
      'setting': setting,
      'closed form': 100 * steps_s[0] / steps_s[quorum - 1],
      'paper': inputs.HETEROGENEOUS.get(setting),
    }
    rows.append((labels, runs))
  waiting = [run_in_lockstep(config, i) for i in range(config.study.seeds)]
  slowest = 100 * steps_s[0] / steps_s[-1]
  rows.append(({'setting': LOCKSTEP, 'closed form': slowest}, waiting))
  return tables.table(
    'heterogeneous',
    'Settings of the protocol',
    FIELDS,
    rows,
    (
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
      tables.over(config.study.seeds),
    ),
  )


def _chart(records: dict) -> Chart:
  """Each setting as a point: how fast rounds close, and with how many."""
  return Chart(
    'pace_and_participation',
    'Pace against participation',
    'participation (% of learners merged in a round)',
    'pace (% of the fastest learner)',
    tuple(
      Line(
        setting,
        'simulated',
        (100 * tables.mean(runs, 'participation'),),
        (100 * tables.mean(runs, 'pace'),),
        (100 * (tables.spread(runs, 'pace') or 0.0),),
        group,
      )
      for group, (setting, runs) in enumerate(records.items())
    ),
    x_range=(0.0, 105.0),
    y_range=(60.0, 105.0),
    notes=(
      'Best is the upper right corner: nobody waits, nobody is left out.',
    ),
  )
