# SPDX-License-Identifier: Apache-2.0
"""Learners that come for a part of the work, and go (the paper's Table 4)."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable

from diloco.config.simulation import SimulationConfig
from diloco.fleets.fleet import DecoupledFleet, FleetResult
from diloco.fleets.systems import scavenging_time
from diloco.metrics.run_progress import counted
from diloco.pages.parts import Chart, Line, ReportPage, Table, Timeline
from diloco.studies import inputs, lanes, tables
from diloco.studies.tables import Field

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
  Field('bootstrap s'),
  Field('from a peer'),
  Field('seconds', 'time_s', hidden=True),
)


@dataclasses.dataclass(frozen=True)
class ScavengingResult:
  """One run, up to its last token."""

  time_s: float  # Duration of the run.
  extra_tokens: float  # Share of the tokens that the extra learners trained.
  # Their participation while present; None: there were none.
  extra_merged: float | None
  # Duration of each, from hello to its first step.
  bootstraps_s: tuple[float, ...]
  peer_bootstraps: int  # How many of those took their state from a learner.
  outcome: FleetResult  # For a timeline.


def report(config: SimulationConfig, say: Callable[[str], None]) -> ReportPage:
  """Runs every number of extra learners with every seed."""
  study = config.study
  results = {}
  runs = list(itertools.product(sorted({0, *study.extra}), range(study.seeds)))
  for extra, i in counted(
    runs,
    say,
    lambda run: f'{run[0]} extra learners, seed {run[1]}',
    cost=lambda run: config.protocol.learners + run[0],
  ):
    results.setdefault(extra, []).append(_run(config, extra, i))
  return ReportPage(
    name=config.name,
    title='Scavenging: learners that come for a part of the work',
    command='python -m diloco.simulate --config=experiments/scavenging.py',
    paragraphs=_paragraphs(config),
    parts=(
      _table(config, results),
      _chart(config, results),
      _timeline(config, results),
    ),
  )


def _run(config: SimulationConfig, extra: int, i: int) -> ScavengingResult:
  """Runs until all have trained as many tokens as the permanent ones would."""
  study, always = config.study, config.protocol.learners
  tokens = study.steps * always * config.fleet.tokens
  run = DecoupledFleet(
    config.protocol,
    inputs.fleet_of(config, always + extra),
    inputs.network_of(config),
    config.seed + i,
    timeline_s=math.inf,
  )
  comers = range(always, always + extra)
  for learner in range(always):
    run.join(learner)
  _train(config, run, study.begin * tokens)
  came_rounds = run.tally.rounds
  for learner in comers:
    run.join(learner)
  _train(config, run, study.end * tokens)
  rounds = run.tally.rounds - came_rounds
  for learner in comers:
    run.leave(learner, study.notice_s)
  _train(config, run, tokens)
  counts = [run.tally.count(learner) for learner in comers]
  merged = sum(count.merged for count in counts)
  return ScavengingResult(
    time_s=run.now_s,
    extra_tokens=sum(count.tokens for count in counts) / run.tally.tokens,
    extra_merged=merged / (rounds * extra) if rounds and extra else None,
    bootstraps_s=tuple(
      end_s - begin_s
      for learner, begin_s, end_s in run.tally.bootstraps
      if learner in comers
    ),
    peer_bootstraps=sum(count.peer_bootstraps for count in counts),
    outcome=run.outcome(always),
  )


def _train(
  config: SimulationConfig, run: DecoupledFleet, tokens: float
) -> None:
  """Goes on until so many tokens are trained in all."""
  bound_s = PATIENCE * config.study.steps * config.fleet.step_s
  run.run(run.now_s + bound_s, stop=lambda: run.tally.tokens >= tokens)
  assert run.tally.tokens >= tokens, f'{tokens=} not trained in {bound_s=}'


def _table(config: SimulationConfig, results: dict) -> Table:
  always, study = config.protocol.learners, config.study
  rows = []
  for extra, several in results.items():
    share = extra / always
    bootstraps_s = [s for result in several for s in result.bootstraps_s]
    labels = {
      'extra %': 100 * share,
      'learners': always + extra,
      'closed form': scavenging_time(share, study.begin, study.end),
      'bootstrap s': statistics.fmean(bootstraps_s) if bootstraps_s else None,
      'from a peer': (
        f'{sum(r.peer_bootstraps for r in several)} of {len(bootstraps_s)}'
      ),
    }
    if _is_papers(config):
      labels['paper'] = inputs.SCAVENGING.get(share)
      labels['paper, data-parallel'] = inputs.SCAVENGING_DATA_PARALLEL.get(
        share
      )
    rows.append((labels, _records(results, extra)))
  return tables.table(
    'scavenging',
    'Time to train the same tokens',
    FIELDS,
    rows,
    (
      'extra: compute that comes, relative to the '
      f'{always} learners that are always there.',
      'relative time: until the same number of tokens was trained, relative to '
      f'nobody coming. {tables.over(study.seeds)}',
      'closed form: (1 - d) + d / (1 + x), coming and going for nothing; '
      f'd = {study.end - study.begin:g}.',
      'extra tokens, extra merged: the share of the tokens that the extra '
      'learners trained; the share of the rounds while they were there that '
      'took one in.',
      'bootstrap: from hello to the first step; from a peer: how many took θ '
      'and the inner optimizer from a learner.',
    ),
  )


def _chart(config: SimulationConfig, results: dict) -> Chart:
  always, study = config.protocol.learners, config.study
  shares = tuple(100 * extra / always for extra in results)
  most = max(shares) or 100.0
  curve = tuple(most * i / 60 for i in range(61))
  exact = tuple(scavenging_time(x / 100, study.begin, study.end) for x in curve)
  runs = [_records(results, extra) for extra in results]
  lines = [
    Line(
      'Decoupled DiLoCo',
      'simulated',
      shares,
      tuple(tables.mean(each, 'relative') for each in runs),
      tuple(tables.spread(each, 'relative') or 0.0 for each in runs),
    ),
    Line('Decoupled DiLoCo', 'closed form', curve, exact),
  ]
  if _is_papers(config):
    for group, (label, figures) in enumerate(
      (
        ('Decoupled DiLoCo', inputs.SCAVENGING),
        ('data-parallel', inputs.SCAVENGING_DATA_PARALLEL),
      )
    ):
      xs = tuple(100 * share for share in figures)
      lines.append(Line(label, 'paper', xs, tuple(figures.values()), (), group))
  return Chart(
    'scavenging',
    'Time against extra compute',
    'extra compute for a part of the work (%)',
    'time relative to none',
    tuple(lines),
    y_range=(0.4, 1.2),
  )


def _timeline(config: SimulationConfig, results: dict) -> Timeline:
  extra = max(results)
  result = results[extra][0]
  always = config.protocol.learners
  names = [f'learner {m}' for m in range(always)]
  names += [f'extra {m}' for m in range(always, always + extra)]
  return lanes.timeline(
    'timeline',
    f'{extra} learners come and go',
    result.outcome,
    names,
    result.time_s,
    notes=(f'Seed {config.seed}.',),
  )


def _paragraphs(config: SimulationConfig) -> tuple[str, ...]:
  network, study = config.network, config.study
  state_gb = 1e-9 * network.params * network.state_bytes_per_param
  return (
    f'{config.protocol.learners} learners train '
    f'{study.steps} steps of {config.fleet.step_s:g} s each. After '
    f'{study.begin:.0%} of the tokens others join, after {study.end:.0%} they '
    f'are told to go, with a notice of {study.notice_s:g} s. Work is counted '
    'in tokens trained, whoever trained them.',
    f'Who comes takes {state_gb:.3g} GB from a peer, over links of '
    f'{network.learner_gbps:g} Gbit/s each way that donors share among those '
    'who ask; nobody else stops. The machines are those of a real run.',
  )


def _records(results: dict, extra: int) -> list[tables.Record]:
  """Returns the runs, with times relative to the same seeds without extra."""
  return [
    vars(result) | {'relative': result.time_s / alone.time_s}
    for result, alone in zip(results[extra], results[0])
  ]


def _is_papers(config: SimulationConfig) -> bool:
  """Returns True if extra learners are there for the paper's share of the
  work.
  """
  return config.study.end - config.study.begin == 0.5
