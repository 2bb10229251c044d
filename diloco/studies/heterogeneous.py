# SPDX-License-Identifier: Apache-2.0
"""Learners of unequal speed under different quorums (the paper's Table 5)."""

import itertools
from collections.abc import Callable, Sequence

from diloco.config.simulation import SimulationConfig
from diloco.metrics.run_progress import counted
from diloco.pages.parts import ReportPage
from diloco.protocol.config import ProtocolConfig
from diloco.studies import study as studies
from diloco.studies.study import Field, Record

FIELDS = (
  Field('setting'),
  Field('pace %', 'pace', factor=100, spread=True),
  Field('closed form', digits=0),
  Field('paper', digits=0),
  Field('stepping %', 'goodput', factor=100),
  Field('merged fast %', 'merged_fast', 0, 100),
  Field('merged slow %', 'merged_slow', 0, 100),
  Field('merged %', 'participation', 0, 100, spread=True),
  Field('age', 'age', 2),
  Field('old %', 'old', factor=100),
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


def run(config: SimulationConfig, setting: str, i: int) -> Record:
  """Returns the figures of the i-th run of a setting."""
  outcome = studies.decoupled(
    config,
    config.seed + i,
    config.study.steps * config.fleet.step_s,
    **protocol_of(setting, config.protocol),
  )
  learners = config.protocol.learners
  fast = learners - config.fleet.slow_learners

  def merged(ids: Sequence[int]) -> float | None:
    return sum(map(outcome.participation, ids)) / len(ids) if ids else None

  return outcome.record() | {
    'merged_fast': merged(range(fast)),
    'merged_slow': merged(range(fast, learners)),
  }


def report(config: SimulationConfig, say: Callable[[str], None]) -> ReportPage:
  """Runs every setting with every seed."""
  study, fleet, protocol = config.study, config.fleet, config.protocol
  runs = list(itertools.product(study.settings, range(study.seeds)))
  records: dict[str, list[Record]] = {}
  for setting, i in counted(runs, say, lambda run: f'{run[0]}, seed {run[1]}'):
    records.setdefault(setting, []).append(run(config, setting, i))
  steps_s = sorted(studies.fleet_of(config, protocol.learners).step_s)
  rows = []
  for setting, each in records.items():
    quorum = protocol_of(setting, protocol)['quorum']
    labels = {
      'setting': setting,
      'closed form': 100 * steps_s[0] / steps_s[quorum - 1],
      'paper': studies.HETEROGENEOUS.get(setting),
    }
    rows.append((labels, each))
  table = studies.table(
    'heterogeneous',
    'Settings of the protocol',
    FIELDS,
    rows,
    (
      'pace: rounds closed, of those that the steps of the fastest learner '
      'make due; what Table 5 of the paper calls goodput. Above 100 where '
      'several learners take turns at being the fastest.',
      'closed form: the pace if all steps of a learner were equally long: that '
      'of the K-th fastest.',
      'stepping: share of the allocated time in steps; nobody waits at any K.',
      'merged: participation, the share of the rounds that took a learner in; '
      'of the fast ones, of the slow ones, of all. Where rounds follow the '
      f'fast ones, a slow one makes a step for {1 - fleet.slow_gap:.0%} of '
      'them.',
      'age: from the arrival of a merged offer to the end of the window, in '
      'steps of its learner, mean; old: share of those above 1.5.',
      'staleness: versions that the base of a merged offer was behind, mean.',
      studies.over(study.seeds),
    ),
  )
  return studies.page(
    config,
    'Learners of unequal speed: what quorum, grace and admission do',
    (
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
    (table,),
  )
