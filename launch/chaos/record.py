# SPDX-License-Identifier: Apache-2.0
"""Reads the folder of a chaos run, and measures the speed of its processes."""

import bisect
import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence

from diloco.config import run_config
from diloco.config.run_config import RunConfig
from diloco.faults import Fault
from diloco.metrics import names, token_tapes
from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import Workdir, learner_name
from launch.chaos.conductor import Course, Folder
from launch.chaos.live_run import WrittenStep
from launch.chaos.simulated import Speed
from launch.program import SYNCER
from launch.supervisor import ProcessEvent

SYNCER_START_S = 3.0  # Where it was never started again.


@dataclasses.dataclass(frozen=True)
class Record:
  """All that is read of a run's folder."""

  config: RunConfig
  plan: tuple[Fault, ...]
  performed: tuple[dict, ...]
  course: Course
  tape: list[dict]
  steps: dict[int, list[WrittenStep]]
  events: tuple[ProcessEvent, ...]
  ledger: token_tapes.Rows

  @property
  def tokens_per_step(self) -> int:
    return self.config.data.batch * self.config.data.seq_len


def read(workdir: Workdir) -> Record:
  """Reads the folder of a chaos run.

  Raises:
    OSError: a file is missing.
    ValueError: a file is not what a chaos run writes.
  """
  folder = Folder(workdir)
  config = run_config.restore(json.loads(workdir.config.read_text()))
  plan = json.loads(folder.plan.read_text())
  course = json.loads(folder.course.read_text())
  lists = {key: tuple(course[key]) for key in ('left', 'late_turns')}
  performed = read_jsonl(folder.faults) if folder.faults.exists() else []
  protocol = config.protocol
  events = [ProcessEvent(**x) for x in read_jsonl(workdir.events)]
  found = Record(
    config=config,
    plan=tuple(Fault(**fault) for fault in plan['faults']),
    performed=tuple(sorted(performed, key=lambda x: x['number'])),
    course=Course(**{**course, **lists}),
    tape=read_jsonl(workdir.tape),
    steps={},
    events=tuple(events),
    ledger=token_tapes.rows_of(
      workdir,
      protocol.fragments,
      config.data.batch * config.data.seq_len,
      protocol.blend,
    ),
  )
  for path in sorted(workdir.tapes.glob('learner-*.jsonl')):
    m = int(path.stem.rpartition('-')[2])
    lines = read_jsonl(workdir.metrics(learner_name(m)))
    found.steps[m] = _steps(lines)
  return found


def fault_of(line: Mapping) -> Fault:
  fields = {field.name for field in dataclasses.fields(Fault)}
  return Fault(**{name: line[name] for name in fields & line.keys()})


def _steps(lines: Sequence[Mapping]) -> list[WrittenStep]:
  return [
    WrittenStep(
      line[names.TIME],
      int(line[names.INCARNATION]),
      line['step'],
      line[names.STEP_TIME],
      line[names.STALL_TIME],
    )
    for line in lines
  ]


def begin_of(record: Record) -> float:
  """Returns when the first learner was ready."""
  return min(x[names.TIME] for x in record.tape if x['kind'] == 'ready')


def speed_of(record: Record) -> Speed:
  """Measures how fast the processes were: in calm, and at their starts."""
  calm = record.course.calm_s, record.course.began_s
  protocol = record.config.protocol
  lengths, useful_s = {}, 0.0
  for m in range(protocol.learners):
    times_s = [s.time_s for s in record.steps[m]]
    i, j = bisect.bisect(times_s, calm[0]), bisect.bisect(times_s, calm[1])
    lengths[m] = [b - a for a, b in itertools.pairwise(times_s[i:j])]
    within = record.steps[m][i + 1 : j]  # Those that the lengths are of.
    useful_s += sum(s.step_s - min(s.stall_s, s.step_s) for s in within)
  jitters = [
    statistics.pstdev(each) / statistics.fmean(each)
    for each in lengths.values()
  ]
  stepped_s = sum(sum(each) for each in lengths.values())
  syncs_s = [
    x['sync_s']
    for x in record.tape
    if x['kind'] == 'Publish' and x[names.TIME] <= calm[1]
  ]
  begin_s = begin_of(record)
  start_s = _start_s(record, _first_step_s)
  return Speed(
    step_s=tuple(statistics.fmean(each) for each in lengths.values()),
    jitter=min(0.3, statistics.fmean(jitters)),
    stall_share=max(0.0, 1 - useful_s / stepped_s),
    sync_s=statistics.median(syncs_s),
    learner_start_s=start_s,
    hello_s=min(start_s, _start_s(record, _hello_s)),
    leave_s=_leave_s(record),
    syncer_start_s=_start_s(record, _first_line_s),
    restart_delay_s=record.config.run.restart_delay_s,
    arrival_s=tuple(
      max(0.0, record.steps[m][0].time_s - begin_s)
      for m in range(protocol.learners)
    ),
  )


def _first_step_s(record: Record, event: ProcessEvent) -> float | None:
  if not event.process.startswith('learner-') or '.' in event.process:
    return None
  steps = record.steps.get(int(event.process.rpartition('-')[2]), ())
  later = (s.time_s for s in steps if s.time_s > event.time_s)
  return next(later, None)


def _hello_s(record: Record, event: ProcessEvent) -> float | None:
  later = (
    x[names.TIME]
    for x in record.tape
    if x['kind'] == 'joined'
    and learner_name(x['learner']) == event.process
    and x[names.TIME] > event.time_s
  )
  return next(later, None)


def _leave_s(record: Record) -> float:
  """Returns the median time in which learners left; 0: none did."""
  told: dict[int, float] = {}
  found = []
  for event in record.events:
    if event.time_s > record.course.ended_s:
      break
    if event.event == 'stopped' and event.process.startswith('learner-'):
      told[event.pid] = event.time_s
    elif event.event == 'exited' and event.pid in told:
      found.append(event.time_s - told[event.pid])
  return statistics.median(found) if found else 0.0


def _first_line_s(record: Record, event: ProcessEvent) -> float | None:
  if event.process != SYNCER:
    return None
  later = (x[names.TIME] for x in record.tape if x[names.TIME] > event.time_s)
  return next(later, None)


def _start_s(
  record: Record, first_s: Callable[[Record, ProcessEvent], float | None]
) -> float:
  """Returns the median length of a start: of a return, if there was one."""
  seen, returns, firsts = set(), [], []
  for event in record.events:
    if event.event != 'started' or event.time_s > record.course.ended_s:
      continue
    at_s = first_s(record, event)
    if at_s is not None:
      took_s = at_s - event.time_s
      (returns if event.process in seen else firsts).append(took_s)
    seen.add(event.process)
  if first_s is _first_line_s:  # At its first start it waits for learners.
    firsts = [SYNCER_START_S]
  return statistics.median(returns or firsts)
