# SPDX-License-Identifier: Apache-2.0
"""Learners that come for a part of the work, and go (the paper's Table 4), and
what it costs that one comes (its Fig. 12).
"""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence

from diloco.config.simulation import SimulationConfig
from diloco.fleets.fleet import DecoupledFleet
from diloco.fleets.systems import DECOUPLED, scavenging_time
from diloco.metrics import figures
from diloco.metrics.run_progress import counted
from diloco.pages.parts import Chart, Line, ReportPage, Table
from diloco.simulator.network import Network
from diloco.studies import study as studies
from diloco.studies.study import Field, Record

PATIENCE = 4.0  # Times as long as it takes without extra learners.

FIELDS = (
  Field('extra %', digits=0),
  Field('learners'),
  Field('relative time', 'relative', 3, spread=True),
  Field('closed form', digits=3),
  Field('paper', digits=2),
  Field('paper, data-parallel', digits=2),
  Field('extra tokens %', 'extra_tokens', factor=100),
  Field('extra merged %', 'extra_merged', 0, 100),
  Field('bootstrap s', 'bootstrap_s'),
  Field('from a peer', 'peer_bootstraps', 0),
)
COSTS = (
  Field('copy, steps', digits=0),
  Field('cost, steps', 'cost_steps', 2, spread=True),
  Field('of the newcomer alone', digits=2),
  Field('data-parallel', digits=0),
)


def report(config: SimulationConfig, say: Callable[[str], None]) -> ReportPage:
  """Runs every number of extra learners with every seed."""
  study, network = config.study, config.network
  always = config.protocol.learners
  runs = list(itertools.product(sorted({0, *study.extra}), range(study.seeds)))
  records: dict[int, list[Record]] = {}
  for extra, i in counted(
    runs,
    say,
    lambda run: f'{run[0]} extra learners, seed {run[1]}',
    cost=lambda run: always + run[0],
  ):
    record = run(config, extra, i)
    # Relative to the same seed without extra learners, which comes first.
    alone_s = records[0][i]['time_s'] if extra else record['time_s']
    record['relative'] = record['time_s'] / alone_s
    records.setdefault(extra, []).append(record)
  seeds = counted(range(study.seeds), say, lambda i: f'one comes, seed {i}')
  of_copies = list(zip(*(costs(config, i) for i in seeds)))
  state_gb = 1e-9 * network.params * network.state_bytes_per_param
  return studies.page(
    config,
    'Scavenging: learners that come for a part of the work',
    (
      f'{always} learners train {study.steps} steps of '
      f'{config.fleet.step_s:g} s each. After {study.begin:.0%} of the tokens '
      f'others join, after {study.end:.0%} they are told to go, with a notice '
      f'of {study.notice_s:g} s. Work is counted in tokens trained, whoever '
      'trained them.',
      f'Who comes takes {state_gb:.3g} GB from a peer, over links of '
      f'{network.learner_gbps:g} Gbit/s each way that donors share among those '
      'who ask; nobody else stops. The machines are those of a real run.',
    ),
    (
      _table(config, records),
      _chart(config, records),
      _cost_table(config, of_copies),
    ),
  )


def run(config: SimulationConfig, extra: int, i: int) -> Record:
  """Runs until all have trained as many tokens as the permanent ones would."""
  study, always = config.study, config.protocol.learners
  tokens = study.steps * always * config.fleet.tokens
  fleet = _fleet(config, always + extra, i, studies.network_of(config))

  def train(share: float):
    bound_s = PATIENCE * study.steps * config.fleet.step_s
    wanted = share * tokens
    fleet.run(fleet.now_s + bound_s, stop=lambda: fleet.tally.tokens >= wanted)
    assert fleet.tally.tokens >= wanted, f'{wanted=} not trained in {bound_s=}'

  comers = range(always, always + extra)
  for learner in range(always):
    fleet.join(learner)
  train(study.begin)
  came_rounds = fleet.tally.rounds
  for learner in comers:
    fleet.join(learner)
  train(study.end)
  rounds = fleet.tally.rounds - came_rounds
  for learner in comers:
    fleet.leave(learner, study.notice_s)
  train(1.0)
  counts = [fleet.tally.count(learner) for learner in comers]
  bootstraps_s = [
    end_s - begin_s
    for learner, begin_s, end_s in fleet.tally.bootstraps
    if learner in comers
  ]
  return {
    'time_s': fleet.now_s,
    'extra_tokens': sum(count.tokens for count in counts) / fleet.tally.tokens,
    # Participation while present; None: there were none.
    'extra_merged': figures.participation(
      sum(count.merged for count in counts), rounds, extra
    ),
    # Of each, from hello to its first step.
    'bootstrap_s': statistics.fmean(bootstraps_s) if bootstraps_s else None,
    'peer_bootstraps': sum(count.peer_bootstraps for count in counts),
  }


def costs(config: SimulationConfig, i: int) -> list[Record]:
  """Lets one learner come; returns the steps of all that its copy costs.

  That is, for each of `copy_steps`, against a copy that takes no time, in a
  window in which all of them end.
  """
  always, step_s = config.protocol.learners, config.fleet.step_s
  every = config.protocol.sync_every_steps
  window = 2 * max(config.study.copy_steps, default=0) + every

  def trained(copy: float) -> int:
    network = studies.network_of(config)
    bps = 8 * network.state_bytes / (copy * step_s) if copy else float('inf')
    network = dataclasses.replace(network, learner_bps=bps)
    fleet = _fleet(config, always + 1, i, network)
    for learner in range(always):
      fleet.join(learner)
    fleet.run(fleet.now_s + every * step_s)
    fleet.join(always)
    fleet.run(fleet.now_s + window * step_s)
    return fleet.tally.tokens

  most, of_a_step = trained(0), config.fleet.tokens * (always + 1)
  return [
    {'cost_steps': (most - trained(copy)) / of_a_step}
    for copy in config.study.copy_steps
  ]


def _fleet(
  config: SimulationConfig, learners: int, i: int, network: Network
) -> DecoupledFleet:
  return DecoupledFleet(
    config.protocol,
    studies.fleet_of(config, learners),
    network,
    config.seed + i,
    timeline_s=float('inf'),  # For the bootstraps.
  )


def _papers(config: SimulationConfig) -> dict[str, dict[float, float]]:
  """The paper's times, where learners come for its share of the work."""
  if config.study.end - config.study.begin != 0.5:
    return {}
  return {
    'paper': studies.SCAVENGING,
    'paper, data-parallel': studies.SCAVENGING_DATA_PARALLEL,
  }


def _table(config: SimulationConfig, records: dict) -> Table:
  always, study = config.protocol.learners, config.study
  rows = []
  for extra, runs in records.items():
    share = extra / always
    labels = {
      'extra %': 100 * share,
      'learners': always + extra,
      'closed form': scavenging_time(share, study.begin, study.end),
    }
    labels |= {k: times.get(share) for k, times in _papers(config).items()}
    rows.append((labels, runs))
  return studies.table(
    'scavenging',
    'Time to train the same tokens',
    FIELDS,
    rows,
    (
      'extra: compute that comes, relative to the '
      f'{always} learners that are always there.',
      'relative time: until the same number of tokens was trained, relative to '
      f'nobody coming. {studies.over(study.seeds)}',
      'closed form: (1 - d) + d / (1 + x), coming and going for nothing; '
      f'd = {study.end - study.begin:g}.',
      'extra tokens, extra merged: the share of the tokens that the extra '
      'learners trained; the share of the rounds while they were there that '
      'took one in.',
      'bootstrap: from hello to the first step; from a peer: how many took θ '
      'and the inner optimizer from a learner.',
    ),
  )


def _cost_table(
  config: SimulationConfig, of_copies: Sequence[Sequence[Record]]
) -> Table:
  learners = config.protocol.learners + 1
  rows = [
    (
      {
        'copy, steps': copy,
        'of the newcomer alone': copy / learners,
        'data-parallel': copy,
      },
      runs,
    )
    for copy, runs in zip(config.study.copy_steps, of_copies)
  ]
  return studies.table(
    'upsizing',
    'What it costs that a learner comes',
    COSTS,
    rows,
    (
      'copy: inner steps that θ and its moments are on their way from a peer.',
      f'cost: steps of all {learners} learners that are not made, against a '
      f'copy that takes no time. {studies.over(config.study.seeds)}',
      'of the newcomer alone: if nobody but the newcomer waits for its copy; '
      'data-parallel: if all do.',
      'The paper (Fig. 12) has no cost up to 6 steps, and from 24 on that of '
      'data-parallel.',
    ),
  )


def _chart(config: SimulationConfig, records: dict) -> Chart:
  always, study = config.protocol.learners, config.study
  shares = tuple(100 * extra / always for extra in records)
  curve = tuple((max(shares) or 100.0) * i / 60 for i in range(61))
  exact = tuple(scavenging_time(x / 100, study.begin, study.end) for x in curve)
  means, spreads = (
    tuple(statistic(runs, 'relative') or 0.0 for runs in records.values())
    for statistic in (studies.mean, studies.spread)
  )
  lines = [
    Line(DECOUPLED, 'simulated', shares, means, spreads),
    Line(DECOUPLED, 'closed form', curve, exact),
  ]
  for group, times in enumerate(_papers(config).values()):
    xs = tuple(100 * share for share in times)
    label = 'data-parallel' if group else DECOUPLED
    lines.append(Line(label, 'paper', xs, tuple(times.values()), group=group))
  return Chart(
    'scavenging',
    'Time against extra compute',
    'extra compute for a part of the work (%)',
    'time relative to none',
    tuple(lines),
    y_range=(0.4, 1.2),
  )
