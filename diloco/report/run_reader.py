# SPDX-License-Identifier: Apache-2.0
"""Reads the folder of a real run: whole, still going, killed, or with holes."""

import collections
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from diloco.metrics import names
from diloco.metrics import status as metrics_status
from diloco.metrics.files import MalformedFile
from diloco.metrics.goodput import StepRecord, work_of_tape
from diloco.metrics.status import read_status
from diloco.metrics.workdir import EVALUATOR, Workdir, learner_name
from diloco.metrics.writer import CorruptLine, read_jsonl
from diloco.prediction import history
from diloco.prediction.history import Life
from diloco.report import recorded_faults, recorded_run
from diloco.report.recorded_faults import RecordedFault
from diloco.report.recorded_run import (
  Loss,
  RecordedRound,
  RecordedRun,
  RoundShare,
)

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
  events: Sequence[Mapping], begin_s: float, until_s: float
) -> tuple[dict[str, tuple[Life, ...]], tuple[tuple[str, float, float], ...]]:
  """Each process's lives, and (process, begin, end) of pauses.

  Args:
    events: of the launcher.
    begin_s: since the epoch; what times are counted from.
    until_s: counted from there; ends what has no other end.
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
        life = Life(process, at_s, None, None, ended_s=float('inf'), death='')
        of_process.append(life)
      case 'killed' | 'exited' | 'stopped':
        go_on(process, at_s)
        if of_process:
          of_process[-1] = history.ended(of_process[-1], event, at_s)
      case 'paused':
        paused.setdefault(process, at_s)
      case 'went on':
        go_on(process, at_s)
  for process in list(paused):
    go_on(process, until_s)
  return {name: tuple(each) for name, each in found.items()}, tuple(pauses)


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

  def run(self, label: str) -> RecordedRun:
    workdir, learners = self._workdir, range(self._setup.learners)
    tape = self._records(workdir.tape, LINE)
    events = self._records(workdir.events, EVENT)
    metrics = [
      self._records(workdir.metrics(learner_name(m)), STEP) for m in learners
    ]
    begin_s = _begin_s(tape, metrics, events)
    steps, training = self._trained(metrics, begin_s)
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
    known_lives, pauses = lives(_of_run(events), begin_s, until_s)
    counted = self._whole(metrics_status.read_summary, workdir.summary)
    status = self._whole(read_status, workdir.status)
    return RecordedRun(
      label=label,
      folder=workdir.root,
      setup=self._setup,
      steps=steps,
      training=training,
      validation=self._validated(metrics, steps, begin_s, evaluated),
      rounds=closed_rounds,
      records=dict(sorted(collections.Counter(_decisions(tape)).items())),
      lives=_used(known_lives, tape, steps, begin_s),
      pauses=pauses,
      until_s=until_s,
      last_s=begin_s + until_s,
      ended=ended,
      goodput=self._goodput(tape),
      summary=counted,
      status=status,
      evaluation=evaluated,
      faults=self._faults(begin_s),
      gaps=(*self._missing(), *self._gaps),
    )

  def _faults(self, begin_s: float) -> tuple[RecordedFault, ...]:
    try:
      return recorded_faults.read(self._workdir, begin_s)
    except ValueError as error:
      self._gaps.append(f'{error}.')
      return ()

  def _goodput(self, tape: Sequence[dict]) -> float | None:
    """Returns the goodput until the run's end, or the last line of the tape."""
    try:
      work = work_of_tape(reversed(tape), self._setup.learners)
    except ValueError as error:
      self._gaps.append(f'{self._workdir.tape}: {error}.')
      return None
    if work is None:
      return None
    return work.goodput(max(line[names.TIME] for line in tape))

  def _missing(self) -> Iterator[str]:
    if self._absent:
      root = self._workdir.root
      names = (path.relative_to(root).as_posix() for path in self._absent)
      yield f'There is no {", no ".join(names)}.'

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
    good = [record for record in records if all(key in record for key in keys)]
    if len(good) < len(records):
      self._gaps.append(
        f'{path}: {len(records) - len(good)} of {len(records)} lines lack one '
        f'of {", ".join(keys)}; they are left out.'
      )
    return good

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

  def _trained(self, metrics: Sequence[Sequence[dict]], begin_s: float):
    """Inner steps of all learners, and their losses."""
    steps: list[StepRecord] = []
    losses: list[tuple[float, int, float | None]] = []
    for learner, records in enumerate(metrics):
      before = None
      for record in records:
        end_s = record[names.TIME] - begin_s
        if before and record['step'] <= before[0]:
          before = None  # Another process.
        made = history.steps_of_record(learner, record, end_s, before)
        steps += made
        losses.append((end_s, len(made), record.get(names.TRAIN_LOSS)))
        before = record['step'], end_s
    steps.sort(key=lambda step: step.end_s)
    losses.sort(key=lambda loss: loss[0])
    done = np.cumsum([many for _, many, _ in losses]).tolist()
    per_step = self._setup.tokens_per_step
    training = tuple(
      Loss(at_s, per_step * all_steps, loss, many)
      for (at_s, many, loss), all_steps in zip(losses, done, strict=True)
      if loss is not None
    )
    return tuple(steps), training

  def _validated(
    self, metrics, steps: Sequence[StepRecord], begin_s: float, evaluated
  ) -> tuple[Loss, ...]:
    """Returns losses by learners and by the final evaluation, in order of
    time.
    """
    ends_s = np.array([step.end_s for step in steps])
    per_step = self._setup.tokens_per_step

    def at(time_s: float, loss: float) -> Loss:
      done = int(np.searchsorted(ends_s, time_s, side='right'))
      return Loss(time_s, per_step * done, loss)

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
      end_s = steps[-1].end_s if steps else 0.0
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


def _used(
  lives: Mapping[str, Sequence[Life]],
  tape: Sequence[dict],
  steps: Sequence[StepRecord],
  begin_s: float,
) -> dict[str, tuple[Life, ...]]:
  """Adds when syncers first spoke, and when learners first stepped."""
  spoken = [line[names.TIME] - begin_s for line in tape]
  stepped = collections.defaultdict(list)
  for step in steps:
    stepped[learner_name(step.learner)].append(step.end_s - step.step_s)
  used = {}
  for name, of_process in lives.items():
    times_s = sorted(stepped[name])
    used[name] = tuple(
      dataclasses.replace(life, spoke_s=history.first(spoken, life))
      if name == history.SYNCER
      else dataclasses.replace(life, stepped_s=history.first(times_s, life))
      for life in of_process
    )
  return used


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
