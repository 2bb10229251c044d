# SPDX-License-Identifier: Apache-2.0
"""A run's event logs as one timeline: rounds, joins and deaths in order."""

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence

from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import Workdir
from diloco.protocol.incarnation import SESSION_BITS, process_of
from diloco.protocol.syncer import events as syncer_events
from diloco.run import event_log
from diloco.run.event_log import EventLogs, LoggedEvent

ROUND = 'round'
UNCLOSED = 'unclosed'  # A round left open by a syncer's death.
DETAILS = ('snapshot', 'apply', 'progress', 'save')  # From learners' tapes.
COLUMNS, LEFT = 100, 22  # Of a line, and for the time and the subject.


@dataclasses.dataclass(frozen=True)
class TimelineRow:
  """One row of the timeline."""

  time_s: float  # Since the first event.
  kind: str  # Lower case, such as 'left'.
  who: str  # 'round 12', 'learner 3', 'syncer', …
  learners: frozenset[int]  # Learners that it concerns.
  words: str


def timeline_rows(tapes: EventLogs) -> list[TimelineRow]:
  """Returns all rows in the order of their times."""
  rows = [*_of_syncer(tapes), *_of_learners(tapes)]
  rows += _of_launcher(tapes.workdir)
  rows.sort(key=lambda row: row.time_s)  # Stable: a log keeps its order.
  began_s = rows[0].time_s if rows else 0.0
  return [dataclasses.replace(row, time_s=row.time_s - began_s) for row in rows]


def process_numbers(tapes: EventLogs) -> dict[tuple[int, int], int]:
  """Numbers each learner's processes from 1: (learner, process) -> number."""
  seen = {
    (line.event.learner, process_of(line.event.incarnation))
    for line in tapes.syncer
    if isinstance(line.event, syncer_events.AdmitLearner)
  }
  for learner, lines in tapes.learners.items():
    seen.update((learner, line.event.process) for line in lines)
  numbers: dict[tuple[int, int], int] = {}
  for learner, process in sorted(seen):  # A process number is its start time.
    earlier = sum(m == learner for m, _ in numbers)
    numbers[learner, process] = earlier + 1
  return numbers


def _of_syncer(tapes: EventLogs) -> Iterator[TimelineRow]:
  numbers = process_numbers(tapes)
  pending: dict[int, syncer_events.Merge] = {}  # By fragment.
  starts = 0
  for line in tapes.syncer:
    event = line.event
    match event:
      case syncer_events.Merge():
        pending[event.fragment] = event
      case event_log.Publish():
        merge = pending.pop(event.fragment, None)
        yield _round(line, merge or _unexplained(event))
      case event_log.Started():
        for merge in pending.values():
          yield _left_open(line, merge, event)
        pending.clear()
        starts += 1
        yield _started(line, event, starts)
      case syncer_events.AdmitLearner():
        yield _joined(line, event, numbers)
      case syncer_events.LogDecision(kind='joined'):
        pass  # The `Greet` line says more.
      case syncer_events.LogDecision():
        yield _record(line, event)
      case syncer_events.LogReformed():
        yield _reformed(line, event)
      case syncer_events.End():
        words = (
          f'the run is over at step {event.step}, {event.closed_round} rounds'
        )
        yield TimelineRow(line.time_s, 'end', 'syncer', frozenset(), words)


def _round(line: LoggedEvent, merge: syncer_events.Merge) -> TimelineRow:
  learners = frozenset(share.learner for share in merge.shares)
  shares = ', '.join(_share(share, merge.version) for share in merge.shares)
  words = (
    f'p{merge.fragment} v{merge.version} t{merge.step}: {shares}; '
    f'{merge.reason}'
  )
  return TimelineRow(
    line.time_s, ROUND, f'round {merge.round}', learners, words
  )


def _share(share: syncer_events.Share, version: int) -> str:
  """Returns weight and age of an offer; * marks an older base."""
  older = '*' if share.base_version < version - 1 else ''
  return f'{share.learner} {share.weight:.0%}{older} {share.age_s:.2f} s'


def _unexplained(event: event_log.Publish) -> syncer_events.Merge:
  """Returns an empty merge for a round without a line on its window."""
  return syncer_events.Merge(
    event.round,
    event.fragment,
    event.version,
    event.step,
    event.shares,
    0.0,
    0.0,
    'no Merge line',
  )


def _left_open(
  line: LoggedEvent, merge: syncer_events.Merge, started: event_log.Started
) -> TimelineRow:
  """Returns the row of a merge at which the syncer was killed.

  The ledger says whether its round closed.
  """
  if started.versions[merge.fragment] == merge.version:
    return _round(line, merge)
  learners = frozenset(share.learner for share in merge.shares)
  who = f'round {merge.round}'
  words = 'had been merged when the syncer died, and did not close'
  return TimelineRow(line.time_s, UNCLOSED, who, learners, words)


def _started(
  line: LoggedEvent, event: event_log.Started, starts: int
) -> TimelineRow:
  kind, words = 'start', f'starts, {len(event.versions)} fragments'
  if starts > 1:
    kind, words = (
      'restart',
      f'start {starts}, goes on after round {event.closed_round}',
    )
  behind = [
    p
    for p, (v, outer) in enumerate(zip(event.versions, event.outer_versions))
    if v != outer
  ]
  if behind:
    words += f'; outer state of an older version: fragments {behind}'
  return TimelineRow(line.time_s, kind, 'syncer', frozenset(), words)


def _joined(
  line: LoggedEvent, event: syncer_events.AdmitLearner, numbers
) -> TimelineRow:
  process = numbers[event.learner, process_of(event.incarnation)]
  session = event.incarnation % (1 << SESSION_BITS)
  words = f'joins: process {process}, session {session}, step {event.step}'
  if event.rows:
    words += f', its row {event.rows}'
  return _learners(line, 'joined', event.learner, words)


def _record(line: LoggedEvent, event: syncer_events.LogDecision) -> TimelineRow:
  if event.learner < 0:
    return TimelineRow(
      line.time_s,
      event.kind,
      'syncer',
      frozenset(),
      f'{event.kind}: {event.reason}',
    )
  kind = event.kind
  if kind == 'left' and not event.reason.startswith('goodbye'):
    kind = 'lost'
  return _learners(line, kind, event.learner, f'{kind}: {event.reason}')


def _reformed(
  line: LoggedEvent, event: syncer_events.LogReformed
) -> TimelineRow:
  words = (
    f'{event.slices_before} -> {event.slices} of {event.slices_of} slices at '
    f'its step {event.step}, {event.lost_steps} steps lost; {event.reason}'
  )
  return _learners(line, 're-formed', event.learner, words)


def _of_learners(tapes: EventLogs) -> Iterator[TimelineRow]:
  numbers = process_numbers(tapes)
  for learner, lines in tapes.learners.items():
    for line in lines:
      event = line.event
      number = numbers[learner, event.process]
      words = f'process {number}: {_words(event, learner, numbers)}'
      yield _learners(line, event_log.kind_of(event).lower(), learner, words)


def _words(event, learner: int, numbers) -> str:
  match event:
    case event_log.BeginLogged():
      source = event.source
      words = f'trains from row {event.rows}, state of {source.kind}'
      if source.kind != event_log.SEED.kind:
        donor = learner if source.learner is None else source.learner
        number = numbers.get((donor, source.process), '?')
        words += f' (learner {donor}, process {number}, step {source.step})'
      return words
    case event_log.SnapshotLogged():
      return (
        f'step {event.step}: offers p{event.fragment} against '
        f'v{event.base_version}, round {event.round}'
      )
    case event_log.ApplyLogged():
      carry = ', carries its progress on' if event.carry else ''
      return (
        f'step {event.step}: takes in p{event.fragment} v{event.version}{carry}'
      )
    case event_log.Progress():
      return f'step {event.step}: the schedule is at {event.progress}'
    case event_log.SaveLogged():
      return f'step {event.step}: its state is copied'
    case event_log.CeaseLogged():
      return f'ceases after step {event.step}'
    case event_log.LeaveLogged():
      return f'leaves after step {event.step}: {event.reason}'
  raise TypeError(f'Not of a learner: {event!r}.')


def _learners(
  line: LoggedEvent, kind: str, learner: int, words: str
) -> TimelineRow:
  who = f'learner {learner}'
  return TimelineRow(line.time_s, kind, who, frozenset({learner}), words)


def _of_launcher(workdir: Workdir) -> Iterator[TimelineRow]:
  """Yields starts and ends of processes, if a launcher recorded them."""
  for record in read_jsonl(workdir.events):
    name = record['process']
    learner = name.removeprefix('learner-')
    concerned = {int(learner)} if learner.isdecimal() else set()
    # The lab writes such records, too: its learners are no processes.
    pid = f' ({record["pid"]})' if 'pid' in record else ''
    words = f'{name}{pid} {record["event"]}: {record["detail"]}'
    yield TimelineRow(
      record['time_s'], 'process', 'launcher', frozenset(concerned), words
    )


def chosen(
  rows: Sequence[TimelineRow],
  learner: int | None,
  from_s: float,
  to_s: float,
  kinds: frozenset[str],
) -> list[TimelineRow]:
  """Returns the rows asked for; details only for one learner, or by kind."""
  return [
    row
    for row in rows
    if from_s <= row.time_s <= to_s
    and (learner is None or learner in row.learners)
    and (row.kind in kinds if kinds else True)
    and (row.kind not in DETAILS or learner is not None or bool(kinds))
  ]


def text(shown: Sequence[TimelineRow]) -> Iterator[str]:
  """Yields the rows as lines of `COLUMNS`."""
  for row in shown:
    left = f'{row.time_s:9.2f}  {row.who:<11}'
    for line in textwrap.wrap(row.words, COLUMNS - LEFT) or ['']:
      yield f'{left}{line}'
      left = ' ' * LEFT
