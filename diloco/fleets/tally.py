# SPDX-License-Identifier: Apache-2.0
"""Counts what a simulated fleet does, and keeps data for a timeline."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from diloco.metrics import figures
from diloco.metrics import goodput as metrics_goodput
from diloco.metrics.ages import ContributionAges
from diloco.metrics.goodput import LearnerWork, Work, joined
from diloco.protocol.learner import events as learner_events
from diloco.protocol.syncer import events as syncer_events
from diloco.simulator.engine import Observer

Span = tuple[float, float]
COMPACT_AT = 4096  # Spans that are kept separately before they are joined.


class BusyIntervals:
  """The measure of a union of spans, in bounded memory."""

  def __init__(self):
    self._spans: list[Span] = []
    self._compact_at = COMPACT_AT

  def add(self, spans: Iterable[Span]):
    self._spans += spans
    if len(self._spans) >= self._compact_at:
      self._spans = joined(self._spans)
      self._compact_at = max(COMPACT_AT, 2 * len(self._spans))

  def measure_s(self, until_s: float) -> float:
    """Returns the measure of what lies before `until_s`."""
    return sum(
      max(0.0, min(end, until_s) - begin) for begin, end in joined(self._spans)
    )


@dataclasses.dataclass
class LearnerCount:
  """The counts of one learner id, over all its processes."""

  steps: int = 0
  stepping_s: float = 0.0  # In finished steps.
  # As in `metrics.goodput`, times the share of slices present.
  useful_s: float = 0.0
  tokens: int = 0
  merged: int = 0  # Rounds that included it.
  weight: float = 0.0  # Sum of its shares of these rounds.
  merged_tokens: int = 0  # Of these rounds; each token counts P times.
  staleness: int = 0  # Sum of the versions that its bases were behind.
  ages: ContributionAges = dataclasses.field(
    default_factory=ContributionAges
  )  # Ages of merged offers.
  bootstraps: int = 0
  peer_bootstraps: int = 0


class Tally(Observer):
  """An observer that counts what happens in a cluster.

  Attributes:
    delays: histogram of the learner's steps between the copy of a merged
      fragment and taking in the resulting version.

  Args:
    timeline_s: events before this time are kept for a picture.
  """

  def __init__(self, timeline_s: float = 0.0):
    self.learners: dict[int, LearnerCount] = {}
    self.stepping = BusyIntervals()
    self.rounds = 0
    self.tokens = 0
    self.participants = 0  # Shares of all rounds.
    self.grace_s = 0.0
    self.events = 0
    self.steps_spans: list[tuple[int, float, float]] = []  # By learner.
    self.bootstraps: list[tuple[int, float, float]] = []
    # Per round: its number, times of due, quorum and merge.
    self.round_spans: list[tuple[int, float, float, float]] = []
    self.delays: collections.Counter[int] = collections.Counter()
    # Steps of the copies, by learner and p, then by handle.
    self._copied: dict[tuple[int, int], dict[int, int]] = {}
    self.merged_marks: list[
      tuple[float, int, int]
    ] = []  # Time, learner, round.
    self._timeline_s = timeline_s
    self._work = Work(planned=0)
    self._processes: dict[int, Any] = {}  # The newest that has stepped,
    self._sessions: dict[tuple[int, int], Any] = {}  # and by incarnation.

  @property
  def mean_delay_steps(self) -> float | None:
    """Mean of `delays`; None if no update was taken in."""
    many = self.delays.total()
    return sum(x * n for x, n in self.delays.items()) / many if many else None

  def count(self, learner: int) -> LearnerCount:
    if learner not in self.learners:
      self.learners[learner] = LearnerCount()
    return self.learners[learner]

  def stepped(self, process, spans: list[Span], tokens: int):
    count = self.count(process.id)
    made_s = sum(end - begin for begin, end in spans)
    count.steps += 1
    count.stepping_s += made_s
    self._note_work(process, made_s * process.capacity)
    count.tokens += tokens
    self.tokens += tokens
    self.stepping.add(spans)
    if spans[-1][1] <= self._timeline_s:
      self.steps_spans += [(process.id, *span) for span in spans]

  def settle(self):
    """Deducts deaths from the useful time; call it before reading that."""
    for learner, process in self._processes.items():
      self._end_of(process)
      self._count_useful(learner)

  def rest(self):
    """Lets go of all processes: each is over, or goes on as another one."""
    self.settle()
    self._processes.clear()
    self._sessions.clear()

  def works(self) -> tuple[LearnerWork, ...]:
    """Returns the work of all that ever stepped, as `settle` left it."""
    return tuple(self._work.learners.values())

  def goodput(self, learners: int, until_s: float) -> float:
    """Returns the goodput of M learners from 0 on, as `settle` left it."""
    return metrics_goodput.share(self.works(), learners, 0.0, until_s)

  def uptime(self, until_s: float) -> float:
    """Returns the share of the time with at least one learner stepping."""
    return self.stepping.measure_s(until_s) / until_s

  def participation(self, learner: int) -> float | None:
    """Returns the share of the rounds that merged a learner."""
    if learner not in self.learners:
      return None
    return figures.participation(self.learners[learner].merged, self.rounds)

  def mean_participation(self, learners: int) -> float | None:
    """Returns the mean over M learners of their shares of the rounds."""
    return figures.participation(self.participants, self.rounds, learners)

  def _note_work(self, process, made_s: float):
    """Notes that a process made a step of so many useful seconds."""
    learner, work = process.id, self._work
    old = self._processes.get(learner)
    if old is not process:
      if old is not None:
        self._end_of(old)
      known = work.learners.get(learner)
      number = known.process + 1 if known else 0
      work.join(learner, number, process.started_s)
      if (world := process.world).reformed:
        share = world.slices / world.of
        work.reform(learner, process.first_step, share)
      self._processes[learner] = process
    self._sessions[learner, process.incarnation] = process
    known = work.learners[learner]
    step = process.machine.snapshot().completed_step + 1
    work.step(learner, known.process, step, known.made_s + made_s)
    self._count_useful(learner)

  def _end_of(self, process):
    """Notes the end of a process; a death loses what was not kept."""
    work, learner = self._work, process.id
    number = work.learners[learner].process
    work.merge(learner, number, process.saved_step)
    if not process.alive:
      work.leave(learner, in_order=False)
    elif process.gone:
      work.leave(learner, in_order=True)

  def _keep(self, share: syncer_events.Share):
    m = share.learner
    process = self._sessions.get((m, share.incarnation))
    if process is not None and process is self._processes[m]:
      self._work.merge(m, self._work.learners[m].process, share.step)

  def _count_useful(self, learner: int):
    self.count(learner).useful_s = self._work.learners[learner].useful_s

  def at_syncer(self, syncer, event, effects):
    self.events += 1
    for effect in effects:
      match effect:
        case syncer_events.Merge():
          self._merge(syncer.now, effect)
        case syncer_events.Publish():
          for share in effect.shares:
            self._keep(share)

  def at_learner(self, process, event, effects):
    self.events += 1
    step = process.machine.snapshot().step
    for effect in effects:
      match effect:
        case learner_events.Begin():
          self._begin(process)
        case learner_events.Snapshot(fragment=p):
          self._still_of_use(process.id, effect)[effect.handle] = step
        case learner_events.Apply(fragment=p):
          copied = self._copied.get((process.id, p), {}).get(effect.handle)
          if copied is not None:
            self.delays[step - copied] += 1
          self._still_of_use(process.id, effect)

  def _still_of_use(
    self, learner: int, effect: learner_events.Snapshot | learner_events.Apply
  ) -> dict[int, int]:
    """Returns the copies that a round may yet merge; forgets others."""
    key = learner, effect.fragment
    copied = self._copied.get(key, {})
    self._copied[key] = {h: copied[h] for h in copied if h in effect.keep}
    return self._copied[key]

  def _merge(self, now_s: float, merge: syncer_events.Merge):
    self.rounds += 1
    self.grace_s += merge.grace_s
    self.participants += len(merge.shares)
    for share in merge.shares:
      count = self.count(share.learner)
      count.merged += 1
      count.weight += share.weight
      count.merged_tokens += share.c_tokens
      count.ages.add(share.age_steps)
      count.staleness += merge.version - 1 - share.base_version
    if now_s <= self._timeline_s:
      due_s = now_s - merge.quorum_s - merge.grace_s
      quorum_s = now_s - merge.grace_s
      self.round_spans.append((merge.round, due_s, quorum_s, now_s))
      for share in merge.shares:
        self.merged_marks.append((now_s, share.learner, merge.round))

  def _begin(self, process):
    count = self.count(process.id)
    count.bootstraps += 1
    for key in [key for key in self._copied if key[0] == process.id]:
      del self._copied[key]  # Made by a process that is dead.
    if process.machine.snapshot().source.startswith('learner'):
      count.peer_bootstraps += 1
    if process.now <= self._timeline_s:
      self.bootstraps.append((process.id, process.started_s, process.now))
