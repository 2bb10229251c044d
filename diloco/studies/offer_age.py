# SPDX-License-Identifier: Apache-2.0
"""Studies how old merged offers are, and how many learners take part."""

import dataclasses
import math
from collections.abc import Callable

from diloco.config.simulation import SimulationConfig
from diloco.metrics.run_progress import counted
from diloco.pages.parts import ReportPage
from diloco.protocol.syncer import events as syncer_events
from diloco.simulator.cluster import Cluster, ClusterOptions
from diloco.simulator.engine import Observer
from diloco.simulator.timing import Timing
from diloco.studies import tables
from diloco.studies.tables import Field

OLD_STEPS = 1.5  # Of the learner's own; an offer is due each step at most.
AGE_MAX, OLD_MAX = 0.8, 0.05  # What is aimed at: mean, share that is old,
MERGED_MIN, MERGED_MIN_FAR = 0.95, 0.9  # and participation, by link.
HORIZON = 3.0  # Times the planned length: a run that takes longer hangs.
FIELDS = (
  Field('link'),
  Field('τ', digits=0),
  Field('M', digits=0),
  Field('K', digits=0),
  Field('P', digits=0),
  Field('age', 'mean', 2),
  Field('old %', 'old', factor=100),
  Field('merged %', 'merged', factor=100),
  Field('encodings', 'encodings', 2),
  Field('reached'),
)


@dataclasses.dataclass(frozen=True)
class OfferAgeSetting:
  """One setting of the study."""

  far: bool
  overlap: int
  learners: int
  quorum: int
  fragments: int

  def __str__(self) -> str:
    return (
      f'{"far" if self.far else "near"}, τ = {self.overlap}, '
      f'M = {self.learners}, K = {self.quorum}, P = {self.fragments}'
    )


@dataclasses.dataclass(frozen=True)
class OfferAgeResult:
  """The result of one setting, over all seeds."""

  mean: float  # Age of a merged offer, in steps of its learner.
  old: float  # Share of those older than `OLD_STEPS`.
  merged: float  # Participation, over learners and rounds.
  encodings: float  # Offers that a learner made per inner step.

  def reached(self, far: bool) -> bool:
    """Returns True if the aims are met; over a far link, participation only."""
    if far:
      return self.merged >= MERGED_MIN_FAR
    return (
      self.mean <= AGE_MAX and self.old <= OLD_MAX and self.merged >= MERGED_MIN
    )


class _Shares(Observer):
  """Collects the ages of all that is merged before the run finishes."""

  def __init__(self):
    self.rounds = 0
    self.ages: list[float] = []

  def at_syncer(self, syncer, event, effects):
    for effect in effects:
      if (
        isinstance(effect, syncer_events.Merge)
        and 'finish' not in effect.reason
      ):
        self.rounds += 1
        self.ages += [share.age_steps for share in effect.shares]


def report(config: SimulationConfig, say: Callable[[str], None]) -> ReportPage:
  """Runs every setting with every seed."""
  rows = []
  for cell in counted(cells(config), say):
    ages = measure(config, cell)
    labels = {
      'link': f'{config.study.far_steps} steps' if cell.far else 'near',
      'τ': cell.overlap,
      'M': cell.learners,
      'K': cell.quorum,
      'P': cell.fragments,
      'reached': 'yes' if ages.reached(cell.far) else 'no',
    }
    rows.append((labels, [vars(ages)]))
  table = tables.table(
    'offer_age',
    'Ages of merged offers',
    FIELDS,
    rows,
    notes=(
      'age: from the arrival of an offer to the end of the window, in steps of '
      f'its learner, mean; old: older than {OLD_STEPS} steps.',
      'merged: participation, share of the rounds that took a learner in.',
      'encodings: offers that a learner made per inner step, refreshed ones '
      'included.',
      f'reached: age ≤ {AGE_MAX}, old ≤ {100 * OLD_MAX:.0f} %, merged ≥ '
      f'{100 * MERGED_MIN:.0f} %; over the far link merged ≥ '
      f'{100 * MERGED_MIN_FAR:.0f} %.',
      f'{config.study.steps} steps, {config.study.seeds} seeds together.',
    ),
  )
  return ReportPage(
    name=config.name,
    title='How old is what a round merges?',
    command='python -m diloco.simulate --config=experiments/offer_age.py',
    paragraphs=(
      'Learners of the same speed whose steps vary in length drift apart. An '
      'offer that misses its round by a moment should be merged nevertheless, '
      'and what is merged should be of the last boundary.',
    ),
    parts=(table,),
  )


def cells(config: SimulationConfig) -> list[OfferAgeSetting]:
  """Near link with every τ, then the far one."""
  study = config.study
  links = [(False, overlap) for overlap in study.overlaps]
  links += [(True, study.far_overlap)]
  return [
    OfferAgeSetting(far, overlap, learners, quorum, fragments)
    for far, overlap in links
    for learners in study.learners
    for quorum in sorted({1, max(1, learners // 2)})
    for fragments in study.fragments
  ]


def measure(config: SimulationConfig, cell: OfferAgeSetting) -> OfferAgeResult:
  """All seeds of one setting."""
  shares, steps, offers = _Shares(), 0, 0
  for i in range(config.study.seeds):
    cluster = _run(config, cell, config.seed + i, shares)
    steps += sum(each.steps for each in cluster.learners.values())
    offers += sum(
      each.machine.snapshot().handles for each in cluster.learners.values()
    )
  merged = len(shares.ages)
  return OfferAgeResult(
    mean=math.fsum(shares.ages) / merged,
    old=sum(age > OLD_STEPS for age in shares.ages) / merged,
    merged=merged / (shares.rounds * cell.learners),
    encodings=offers / steps,
  )


def _run(
  config: SimulationConfig, cell: OfferAgeSetting, seed: int, observer: Observer
) -> Cluster:
  step_s, network = config.fleet.step_s, config.network
  far_s = config.study.far_steps * step_s
  cluster = Cluster(
    dataclasses.replace(
      config.protocol,
      learners=cell.learners,
      fragments=cell.fragments,
      overlap_steps=cell.overlap,
      quorum=cell.quorum,
      total_steps=config.study.steps,
    ),
    Timing(
      dict.fromkeys(range(cell.learners), step_s),
      jitter=config.fleet.jitter,
      latency_s=far_s if cell.far else network.latency_s,
      transfer_s=network.encode_s,
      encode_s=network.encode_s,
      merge_s=network.merge_s,
    ),
    seed,
    observer=observer,
    options=ClusterOptions(checkpoint_rounds=cell.fragments),
  )
  for learner in range(cell.learners):
    cluster.start(learner)
  cluster.run(HORIZON * config.study.steps * step_s)
  assert cluster.ended is not None, f'{cell} hangs'
  return cluster
