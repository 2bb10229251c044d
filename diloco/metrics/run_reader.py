# SPDX-License-Identifier: Apache-2.0
"""Reads the folder of a run: whole, still going, killed, or with holes.

All that looks at a run after the fact reads it here: the report, the replay by
simulation, the lab's tests.
"""

import bisect
import collections
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from diloco.metrics import names, recorded_faults, recorded_run
from diloco.metrics import status as metrics_status
from diloco.metrics.files import MalformedFile
from diloco.metrics.goodput import StepRecord, work_of_tape
from diloco.metrics.jsonl import CorruptLine, read_jsonl
from diloco.metrics.recorded_faults import RecordedFault
from diloco.metrics.recorded_run import (
  SYNCER,
  Life,
  Loss,
  RecordedRound,
  RecordedRun,
  RoundShare,
)
from diloco.metrics.tape_counts import (
  StepCounts,
  TapeCounts,
  goodput_of,
  heldout_of,
  tokens_of,
)
from diloco.metrics.workdir import EVALUATOR, Workdir, learner_name

LINE = (names.TIME, 'kind')
EVENT = (names.TIME, 'process', 'event', 'detail')
# What a line must say to be taken.
MERGE = ('round', 'quorum_s', 'grace_s', 'reason')
PUBLISH = ('round', 'step', 'version', 'shares', 'sync_s')
SHARE = ('learner', 'weight', 'age_s', 'base_version')
EVALUATED = (names.TIME, names.EVAL_LOSS)
STEP = (names.TIME, 'step', names.STEP_TIME, names.STALL_TIME)


def rounds(
  tape: Sequence[Mapping], begin_s: float
) -> tuple[tuple[RecordedRound, ...], list[str]]:
  """Rounds that closed, and what is wrong with lines that tell of others.

  Args:
    tape: lines of the syncer's.
    begin_s: since the epoch; what times are counted from.
  """
  found, broken = [], []
  merges: dict[int, Mapping] = {}
  for line in tape:
    match line['kind']:
      case 'Merge' if all(key in line for key in MERGE):
        merges[line['round']] = line
      case 'Publish' if _is_whole(line):
        found.append(_round(line, merges.get(line['round']), begin_s))
      case 'Merge' | 'Publish' as kind:
        broken.append(f'a {kind} line lacks what such lines say')
  several = dict.fromkeys(broken)
  return tuple(found), [
    f'{each} ({broken.count(each)} times).' for each in several
  ]


def _is_whole(line: Mapping) -> bool:
  return all(key in line for key in PUBLISH) and all(
    key in share for share in line['shares'] for key in SHARE
  )


def _round(
  line: Mapping, merge: Mapping | None, begin_s: float
) -> RecordedRound:
  """A merge that no line tells of died with a syncer."""
  return RecordedRound(
    number=line['round'],
    at_s=line[names.TIME] - begin_s,
    step=line['step'],
    shares=tuple(
      RoundShare(
        share['learner'],
        share['weight'],
        share['age_s'],
        line['version'] - 1 - share['base_version'],
        share.get('age_steps'),
      )
      for share in line['shares']
    ),
    quorum_s=merge['quorum_s'] if merge else None,
    grace_s=merge['grace_s'] if merge else None,
    sync_s=line['sync_s'],
    reason=merge['reason'] if merge else 'no Merge line',
  )


def lives(
  events: Sequence[Mapping], begin_s: float
) -> tuple[dict[str, tuple[Life, ...]], tuple[tuple[str, float, float], ...]]:
  """Each process's lives, and (process, begin, end) of pauses.

  Args:
    begin_s: since the epoch; what times are counted from.
  """
  found: dict[str, list[Life]] = {}
  paused: dict[str, float] = {}
  pauses = []

  def go_on(process: str, at_s: float):
    if process in paused:
      pauses.append((process, paused.pop(process), at_s))

  for event in events:
    process, at_s = event['process'], event[names.TIME] - begin_s
    of_process = found.setdefault(process, [])
    match event['event']:
      case 'started':
        of_process.append(Life(process, at_s, event['detail']))
      case 'killed' | 'exited' | 'stopped':
        go_on(process, at_s)
        if of_process:
          of_process[-1] = _ended(of_process[-1], event, at_s)
      case 'paused':
        paused.setdefault(process, at_s)
      case 'went on':
        go_on(process, at_s)
  for process in list(paused):
    go_on(process, float('inf'))
  return {name: tuple(each) for name, each in found.items()}, tuple(pauses)


def _ended(life: Life, event: Mapping, at_s: float) -> Life:
  """The first event of an end has its time; only 'exited' tells how it was."""
  ended_s = min(life.ended_s, at_s)
  match event['event'], event['detail']:
    case 'killed', reason:
      death = f'killed: {reason}'
    case 'exited', how if not life.death and life.ended_s == float('inf'):
      in_good_order = how.startswith('exited with code 0')
      death = '' if in_good_order else how
    case _:
      death = life.death  # Killed, or stopped by the launcher, before.
  return dataclasses.replace(life, ended_s=ended_s, death=death)


def read(folder: pathlib.Path, label: str) -> RecordedRun:
  """The run in a folder that has a config.json.

  Args:
    label: what the page calls it.

  Raises:
    NoReport: config.json is not one of a run.
  """
  workdir = Workdir(folder)
  reader = _Reader(workdir, recorded_run.read(workdir.config))
  return reader.run(label)


class _Reader:
  def __init__(self, workdir: Workdir, configured: recorded_run.Setup):
    self._workdir = workdir
    self._setup = configured
    self._gaps: list[str] = []
    self._absent: list[pathlib.Path] = []
    # Times of records, and the tokens of all learners until then.
    self._tokens: tuple[list[float], list[float]] = [], []

  def run(self, label: str) -> RecordedRun:
    workdir, learners = self._workdir, range(self._setup.learners)
    tape = self._records(workdir.tape, LINE)
    events = self._records(workdir.events, EVENT)
    metrics = [
      self._records(workdir.metrics(learner_name(m)), STEP) for m in learners
    ]
    begin_s = _begin_s(tape, metrics, events)
    known_lives, pauses = lives(_of_run(events), begin_s)
    steps, training, made = self._trained(metrics, known_lives, begin_s)
    evaluated = self._whole(metrics_status.read_evaluation, workdir.evaluation)
    closed_rounds, broken = rounds(tape, begin_s)
    self._gaps += [f'{workdir.tape}: {each}' for each in broken]
    ended = any(line['kind'] == 'End' for line in tape)
    times_s = [step.end_s for step in steps] + [
      each.at_s for each in closed_rounds
    ]
    if not ended:  # The last sign of life.
      heard = (*tape, *_of_run(events))
      times_s += [line[names.TIME] - begin_s for line in heard]
    until_s = max(times_s, default=0.0)
    heard_s = _heard_s(tape, begin_s)
    stopped_s = [
      event[names.TIME] - begin_s
      for event in events
      if event['event'] == 'stopped'
    ]
    records = collections.Counter(_decisions(tape))
    status = self._status()
    if status is None:
      counts = TapeCounts()
      for each in closed_rounds:
        counts.add(each)
      status = counts.status(
        self._setup,
        made,
        records,
        elapsed_s=until_s,
        goodput=self._goodput(tape),
        **heldout_of(each for records in metrics for each in records),
      )
    status = status and metrics_status.with_heldout(
      status, self._workdir, evaluated
    )
    return RecordedRun(
      label=label,
      folder=workdir.root,
      setup=self._setup,
      steps=steps,
      training=training,
      validation=self._validated(
        metrics, steps[-1].end_s if steps else 0.0, begin_s, evaluated
      ),
      rounds=closed_rounds,
      records=dict(sorted(records.items())),
      lives=_used(known_lives, heard_s, steps),
      pauses=pauses,
      joined=frozenset(heard_s.keys() - {SYNCER}),
      stopped_s=min(stopped_s, default=None),
      until_s=until_s,
      last_s=begin_s + until_s,
      ended=ended,
      status=status,
      evaluation=evaluated,
      # Before the gaps: it may add one.
      faults=self._faults(begin_s),
      absent=tuple(
        path.relative_to(workdir.root).as_posix() for path in self._absent
      ),
      gaps=tuple(self._gaps),
    )

  def _faults(self, begin_s: float) -> tuple[RecordedFault, ...]:
    try:
      return recorded_faults.read(self._workdir, begin_s)
    except ValueError as error:
      self._gaps.append(f'{error}.')
      return ()

  def _status(self) -> metrics_status.RunStatus | None:
    """Returns what the syncer counted, or None; a broken file is a gap."""
    workdir = self._workdir
    end = self._whole(metrics_status.read_summary, workdir.summary)
    last = self._whole(metrics_status.read_status, workdir.status)
    return metrics_status.newest(end, last)

  def _goodput(self, tape: Sequence[dict]) -> float | None:
    """Returns the goodput until the run's end, or the last line of the tape."""
    last_s = max((line[names.TIME] for line in tape), default=0.0)
    try:
      work = work_of_tape(reversed(tape), self._setup.learners)
      return goodput_of(self._workdir.result, work, last_s)
    except ValueError as error:
      self._gaps.append(f'{self._workdir.tape}: {error}.')
      return None

  def _records(self, path: pathlib.Path, keys: Sequence[str]) -> list[dict]:
    """Whole lines that have all the keys; what is not there is a gap."""
    if not path.exists():
      self._absent.append(path)
      return []
    try:
      records = read_jsonl(path)
    except CorruptLine as error:
      self._gaps.append(f'{error}: nothing of this file is shown.')
      return []
    lacks = [[key for key in keys if key not in each] for each in records]
    if many := sum(map(bool, lacks)):
      number, lack = next(x for x in enumerate(lacks, start=1) if x[1])
      self._gaps.append(
        f'{path}:{number}: has no {", ".join(lack)}; left out are {many} such '
        f'lines of {len(records)}.'
      )
    return [record for record, lack in zip(records, lacks) if not lack]

  def _whole(self, read_file: Callable, path: pathlib.Path):
    """Returns the contents of a small file; None if it is absent or broken."""
    try:
      found = read_file(path)
    except MalformedFile as error:
      self._gaps.append(f'{error}.')
      return None
    if found is None:
      self._absent.append(path)
    return found

  def _trained(
    self,
    metrics: Sequence[Sequence[dict]],
    lives: Mapping[str, Sequence[Life]],
    begin_s: float,
  ) -> tuple[tuple[StepRecord, ...], tuple[Loss, ...], dict[str, StepCounts]]:
    """Inner steps of all learners, their losses, and sums over the steps.

    A record stands for all steps since the one before of the same process; what
    a process did after its last record is not known.
    """
    steps: list[StepRecord] = []
    losses: list[tuple[float, int, float, float | None]] = []
    sums = {learner_name(m): StepCounts() for m in range(len(metrics))}
    for learner, records in enumerate(metrics):
      starts_s = [
        life.started_s for life in lives.get(learner_name(learner), ())
      ]
      before = None
      for record in records:
        end_s = record[names.TIME] - begin_s
        if before and (
          record['step'] <= before[0]
          or any(before[1] < start_s <= end_s for start_s in starts_s)
        ):
          before = None  # Another process.
        made = _steps_of(learner, record, end_s, before)
        steps += made
        tokens = len(made) * tokens_of(record)
        sums[learner_name(learner)].add(record, len(made))
        losses.append((end_s, len(made), tokens, record.get(names.TRAIN_LOSS)))
        before = record['step'], end_s
    steps.sort(key=lambda step: step.end_s)
    losses.sort(key=lambda loss: loss[0])
    done = np.cumsum([tokens for *_, tokens, _ in losses]).tolist()
    training = tuple(
      Loss(at_s, round(all_tokens), loss, many)
      for (at_s, many, _, loss), all_tokens in zip(losses, done, strict=True)
      if loss is not None
    )
    self._tokens = [each[0] for each in losses], done
    return tuple(steps), training, sums

  def _validated(
    self, metrics, end_s: float, begin_s: float, evaluated
  ) -> tuple[Loss, ...]:
    """Returns losses by learners and by the final evaluation, in order of
    time.
    """
    times_s, tokens = self._tokens

    def at(time_s: float, loss: float) -> Loss:
      done = bisect.bisect_right(times_s, time_s)
      return Loss(time_s, round(tokens[done - 1]) if done else 0, loss)

    path, followed = self._workdir.metrics(EVALUATOR), []
    if path.exists():  # Only where the configuration asks for it.
      followed = self._records(path, EVALUATED)
    found = [
      at(record[names.TIME] - begin_s, record[names.EVAL_LOSS])
      for records in (*metrics, followed)
      for record in records
      if names.EVAL_LOSS in record
    ]
    if evaluated is not None:
      found += [at(0.0, evaluated.initial_loss)]
      found += [at(end_s, evaluated.final_loss)]
    return tuple(sorted(found, key=lambda loss: loss.at_s))


def _begin_s(tape, metrics, events) -> float:
  """Returns when the first learner was ready, or the first known time."""
  ready = [line[names.TIME] for line in tape if line['kind'] == 'ready']
  if ready:
    return min(ready)
  begins = [
    record[names.TIME] - record[names.STEP_TIME]
    for records in metrics
    for record in records
  ]
  heard = [record[names.TIME] for record in (*tape, *events)]
  return min(begins or heard, default=0.0)


def _steps_of(
  learner: int,
  record: Mapping,
  end_s: float,
  before: tuple[int, float] | None,
) -> list[StepRecord]:
  """Returns all steps that a process made since the record before.

  Args:
    end_s: when the last of them ended.
    before: step and end of the record before; None: this is the first.
  """
  many = record['step'] - before[0] if before else 1
  step_s, stall_s = record[names.STEP_TIME], record[names.STALL_TIME]
  mean_s = step_s if many == 1 else (end_s - before[1]) / many
  return [
    StepRecord(learner, end_s - later * mean_s, mean_s, min(stall_s, mean_s))
    for later in reversed(range(many))
  ]


def _heard_s(tape: Sequence[dict], begin_s: float) -> dict[str, list[float]]:
  """Returns when the syncer spoke, and when it heard a learner's hello."""
  heard = collections.defaultdict(list)
  for line in tape:
    at_s = line[names.TIME] - begin_s
    heard[SYNCER].append(at_s)
    if line['kind'] == 'joined' and 'learner' in line:
      heard[learner_name(line['learner'])].append(at_s)
  return heard


def _used(
  lives: Mapping[str, Sequence[Life]],
  heard_s: Mapping[str, Sequence[float]],
  steps: Sequence[StepRecord],
) -> dict[str, tuple[Life, ...]]:
  """Adds when each process was first heard of, and first stepped."""
  stepped = collections.defaultdict(list)
  for step in steps:
    stepped[learner_name(step.learner)].append(step.end_s - step.step_s)
  return {
    name: tuple(
      dataclasses.replace(
        life,
        spoke_s=first_within(heard_s.get(name, ()), life),
        stepped_s=first_within(sorted(stepped[name]), life),
      )
      for life in of_process
    )
    for name, of_process in lives.items()
  }


def first_within(times_s: Iterable[float], life: Life) -> float | None:
  """The first of ascending times that lies within a life."""
  inside = (t for t in times_s if life.started_s <= t < life.ended_s)
  return next(inside, None)


def _of_run(events: Sequence[dict]) -> list[dict]:
  """Returns the events of learners and syncer, without those of evaluations."""
  return [e for e in events if e['process'] not in ('evaluate', EVALUATOR)]


def _decisions(tape: Sequence[dict]):
  """Kinds of the tape's lines but those that every round has."""
  return (
    line['kind']
    for line in tape
    if line['kind'] not in ('Merge', 'Publish', 'Worked')
  )
