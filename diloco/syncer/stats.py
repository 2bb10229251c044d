# SPDX-License-Identifier: Apache-2.0
"""Counts what the syncer sees, for `status.json` and the event log.

Nothing here influences training.
"""

import collections
import dataclasses
import math
import time
from collections.abc import Iterable, Mapping

from diloco.config.run_config import RunConfig
from diloco.metrics import ages as ages_lib
from diloco.metrics import figures
from diloco.metrics import goodput as metrics_goodput
from diloco.metrics import status as metrics_status
from diloco.metrics.goodput import RunningUptime, StepRecord, Work
from diloco.metrics.status import REFUSALS, LearnerStatus
from diloco.protocol import messages
from diloco.protocol.incarnation import process_of
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer.state import Ledger
from diloco.run import event_log


@dataclasses.dataclass
class LearnerStats:
  """The counts of one learner id, over all its incarnations."""

  state: str = metrics_status.JOINING
  incarnations: int = 0
  process: int | None = None  # Number of the newest process.
  beginning: str = ''
  step: int = 0  # Steps of this incarnation.
  steps: int = 0
  tokens: int = 0
  rounds: int = 0
  loss: float | None = None
  tokens_per_s: float = 0.0
  offered_round: int = 0
  lag_versions: int = 0
  bytes_up: int = 0
  bytes_down: int = 0
  step_s: float = 0.0  # Of all steps that were reported,
  stall_s: float = 0.0  # and the part in which they waited.
  stall_max_s: float = 0.0
  link_load: float | None = None
  ages: ages_lib.ContributionAges = dataclasses.field(
    default_factory=ages_lib.ContributionAges
  )


class RunStats:
  """Statistics of a run, updated with every event and effect at the syncer.

  Args:
    parameters: of the model; None: not known.
  """

  def __init__(self, config: RunConfig, parameters: int | None = None):
    self._config = config
    self._parameters = parameters
    self._rows: dict[int, LearnerStats] = collections.defaultdict(LearnerStats)
    # When the run's first learner was ready, and its last close, in seconds
    # since the epoch.
    self._began_s: float | None = None
    self._closed_s = 0.0
    self._uptime: RunningUptime | None = None
    self._observed_before = 0.0, 0.0  # By earlier processes, and up.
    self._last_observed = 0.0, 0.0  # As in the last status.
    self._last_close_s = 0.0  # On this process's clock.
    self._work = Work(config.protocol.learners)
    self._closed_round = 0
    self._step = 0
    self._versions = [0] * config.protocol.fragments
    self._participants: tuple[int, ...] = ()
    self._quorum_s = self._grace_s = self._sync_s = 0.0
    self._refused: collections.Counter[str] = collections.Counter()
    self._pulls_up = self._pulls_down = 0
    self._asked: dict[tuple[int, int], int] = {}  # Bytes, by (round, learner).

  def counts(self) -> dict:
    """Returns the counts that a restarted syncer continues from, as JSON."""
    return {
      'rows': {m: dataclasses.asdict(row) for m, row in self._rows.items()},
      'pulls': [self._pulls_up, self._pulls_down],
      'refused': self._refused,
      'began_s': self._began_s,
      # Not of now: it is asked for at each close, and goes through all steps
      # of a minute.
      'observed': self._last_observed,
    }

  def resume(self, ledger: Ledger, counts: dict):
    """Continues the counts of an earlier process."""
    for learner, fields in counts['rows'].items():
      known = ages_lib.ContributionAges(**fields.get('ages', {}))
      gone = {**fields, 'state': metrics_status.GONE, 'ages': known}
      self._rows[int(learner)] = LearnerStats(**gone)
    self._pulls_up, self._pulls_down = counts['pulls']
    self._refused.update(counts['refused'])
    self._began_s = counts.get('began_s')
    self._observed_before = tuple(counts.get('observed', (0.0, 0.0)))
    self._last_observed = self._observed_before
    self._closed_round = ledger.closed_round
    self._step = ledger.step
    self._versions = list(ledger.versions)

  def resume_work(self, newest_first: Iterable[Mapping]):
    """Continues the count of the learners' work.

    Args:
      newest_first: event log lines of an earlier process of the syncer.

    Raises:
      ValueError: a line has unexpected contents.
    """
    planned = self._config.protocol.learners
    work = metrics_goodput.work_of_tape(newest_first, planned)
    if work is not None:
      work.forget_sessions()
      self._work = work

  # What happened ------------------------------------------------------------

  def note_event(self, event: syncer_events.Event):
    """Counts an event that the machine has absorbed."""
    match event:
      case syncer_events.Heard(message=messages.Report() as report):
        self._note_report(event.learner, report)
        if math.isfinite(report.made_s):  # Else the machine ends that session.
          self._work.step(
            event.learner,
            process_of(event.incarnation),
            report.step,
            report.made_s,
            report.saved_step,
          )
      case syncer_events.Heard(message=messages.Offer() as offer):
        row, p = self._rows[event.learner], offer.fragment
        row.offered_round = max(row.offered_round, offer.round)
        if 0 <= p < len(self._versions):  # Checked by the machine.
          row.lag_versions = self._versions[p] - offer.base_version

  def note_effect(
    self, effect: syncer_events.Effect, at_s: float
  ) -> event_log.Worked | None:
    """Counts an effect that was performed.

    Args:
      at_s: when, in seconds since the epoch, as in the event log.

    Returns:
      The event log line on the learners' work, if one is due.
    """
    self._note_effect(effect)
    return self._note_work(effect, at_s)

  def _note_effect(self, effect: syncer_events.Effect):
    match effect:
      case syncer_events.AdmitLearner():
        row = self._rows[effect.learner]
        row.state = metrics_status.JOINING
        row.incarnations += 1
        process = process_of(effect.incarnation)
        if process != row.process:  # A new session alone has lost no step.
          row.process, row.step = process, 0
      case syncer_events.LogDecision(kind='ready'):
        row = self._rows[effect.learner]
        row.state, row.beginning = metrics_status.LIVE, effect.reason
        self._begin()
      case syncer_events.LogDecision(kind='left'):
        self._rows[effect.learner].state = (
          metrics_status.LEFT if _in_order(effect) else metrics_status.GONE
        )
      case syncer_events.LogDecision(kind=kind) if kind in REFUSALS:
        self._refused[kind] += 1
      case syncer_events.Pull():
        self._asked[effect.round, effect.learner] = effect.offer.payload.nbytes
      case syncer_events.Merge():
        self._note_merge(effect)

  def _note_work(
    self, effect: syncer_events.Effect, at_s: float
  ) -> event_log.Worked | None:
    work = self._work
    if work.end_s is not None:
      return None  # A learner that leaves from now on loses nothing.
    match effect:
      case syncer_events.AdmitLearner():
        process = process_of(effect.incarnation)
        work.join(effect.learner, process, at_s)
      case syncer_events.LogDecision(kind='ready'):
        work.ready(at_s)
      case syncer_events.LogReformed():
        share = effect.slices / effect.slices_of
        work.reform(effect.learner, effect.step, share)
      case syncer_events.LogDecision(kind='left'):
        work.leave(effect.learner, _in_order(effect), at_s)
      case syncer_events.Publish():
        for share in effect.shares:
          process = process_of(share.incarnation)
          work.merge(share.learner, process, share.step)
      case syncer_events.End():
        work.end(at_s)
        return None
      case _:
        return None
    if work.begin_s is None:
      return None
    return event_log.Worked(work.begin_s, tuple(work.learners.values()))

  def note_fetched(self, learner: int, nbytes: int):
    """Counts a payload that a learner pulled and could use."""
    self._rows[learner].bytes_down += nbytes
    self._pulls_down += 1

  def _begin(self):
    if self._began_s is None:
      self._began_s = self._closed_s = time.time()
    if self._uptime is None:
      self._uptime = RunningUptime(
        time.monotonic(), before=self._observed_before
      )

  def _note_report(self, learner: int, report: messages.Report):
    row = self._rows[learner]
    steps = max(report.step - row.step, 0) if row.step else 1
    row.step = report.step
    row.steps += steps
    row.tokens += report.tokens * steps
    row.loss = report.loss if math.isfinite(report.loss) else None
    row.tokens_per_s = report.tokens / max(report.step_s, 1e-9)
    row.step_s += report.step_s
    row.stall_s += report.stall_s
    row.stall_max_s = max(row.stall_max_s, report.stall_s)
    row.link_load = report.link_load or None
    if self._uptime is not None:
      self._uptime.add(
        StepRecord(learner, time.monotonic(), report.step_s, report.stall_s)
      )

  def _note_merge(self, merge: syncer_events.Merge):
    self._quorum_s, self._grace_s = merge.quorum_s, merge.grace_s
    for share in merge.shares:
      nbytes = self._asked[merge.round, share.learner]
      self._rows[share.learner].bytes_up += nbytes
      self._pulls_up += 1
    for key in [k for k in self._asked if k[0] <= merge.round]:
      del self._asked[key]

  def note_publish(self, publish: syncer_events.Publish):
    """Counts a close; call it before `counts` go into the ledger with it."""
    self._closed_round = publish.round
    self._closed_s = time.time()
    self._last_close_s = time.monotonic()
    self._step = publish.step
    self._versions[publish.fragment] = publish.version
    self._participants = tuple(s.learner for s in publish.shares)
    self._sync_s = publish.sync_s
    for share in publish.shares:
      row = self._rows[share.learner]
      row.rounds += 1
      row.ages.add(share.age_steps)

  # What is told -------------------------------------------------------------

  def status(self, finished: bool) -> metrics_status.RunStatus:
    """Returns the status now or, of a finished run, at its last close."""
    now_s, at_s = time.time(), time.monotonic()
    if finished:
      now_s, at_s = self._closed_s or now_s, self._last_close_s or at_s
    began_s = self._began_s
    observed_s, up_s = self._last_observed = self._observed(at_s)
    rows = sorted(self._rows.items())
    ages = ages_lib.total(row.ages for _, row in rows)  # All that was merged.
    return metrics_status.RunStatus(
      run=self._config.name,
      time_s=time.time(),
      step=self._step,
      total_steps=self._config.protocol.total_steps,
      rounds=self._closed_round,
      planned=self._config.protocol.learners,
      fragments=self._config.protocol.fragments,
      parameters=self._parameters,
      live=tuple(m for m, row in rows if row.state == metrics_status.LIVE),
      participants=self._participants,
      quorum_s=self._quorum_s,
      grace_s=self._grace_s,
      sync_s=self._sync_s,
      elapsed_s=None if began_s is None else max(0.0, now_s - began_s),
      goodput=self._work.goodput(now_s),
      uptime=up_s / observed_s if observed_s else 0.0,
      pulls_up=self._pulls_up,
      pulls_down=self._pulls_down,
      bytes_up=sum(row.bytes_up for _, row in rows),
      bytes_down=sum(row.bytes_down for _, row in rows),
      refused=self._refused.total(),
      finished=finished,
      learners=tuple(self._learner_status(m, row) for m, row in rows),
      age_steps=ages.mean_steps,
      old_share=ages.old_share,
    )

  def _learner_status(self, learner: int, row: LearnerStats) -> LearnerStatus:
    named = (field.name for field in dataclasses.fields(row))
    fields = {field.name for field in dataclasses.fields(LearnerStatus)}
    return LearnerStatus(
      **{name: getattr(row, name) for name in named if name in fields},
      learner=learner,
      round=row.offered_round,
      participation=figures.participation(row.rounds, self._closed_round),
      stall_share=row.stall_s / row.step_s if row.step_s else None,
      age_steps=row.ages.mean_steps,
    )

  def _observed(self, now_s: float) -> tuple[float, float]:
    """Returns the time since the first learner was ready, and how much of it at
    least one stepped; without the time in which the syncer was away.
    """
    if self._uptime is None:
      return self._observed_before
    return self._uptime.counts(now_s)


def _in_order(left: syncer_events.LogDecision) -> bool:
  return left.reason.startswith('goodbye')
