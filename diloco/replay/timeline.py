# SPDX-License-Identifier: Apache-2.0
"""A run's tapes as one timeline: rounds, joins and deaths in order."""

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence

from diloco.metrics.jsonl import read_jsonl
from diloco.metrics.workdir import Workdir
from diloco.protocol.incarnation import SESSION_BITS, process_of
from diloco.protocol.syncer import events as syncer_events
from diloco.run import tape_events
from diloco.run.tape_events import EventLogs, LoggedEvent

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
  found = [*_of_syncer(tapes), *_of_learners(tapes)]
  found += _of_launcher(tapes.workdir)
  found.sort(key=lambda each: each.time_s)  # Stable: a tape keeps its order.
  began_s = found[0].time_s if found else 0.0
  return [dataclasses.replace(h, time_s=h.time_s - began_s) for h in found]


def process_numbers(tapes: EventLogs) -> dict[tuple[int, int], int]:
  """Numbers each learner's processes from 1: (learner, process) -> number."""
  seen = {
    (line.said.learner, process_of(line.said.incarnation))
    for line in tapes.syncer
    if isinstance(line.said, syncer_events.AdmitLearner)
  }
  for learner, lines in tapes.learners.items():
    seen.update((learner, line.said.process) for line in lines)
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
    said = line.said
    match said:
      case syncer_events.Merge():
        pending[said.fragment] = said
      case tape_events.Publish():
        merge = pending.pop(said.fragment, None)
        yield _round(line, merge or _unexplained(said))
      case tape_events.Started():
        for merge in pending.values():
          yield _left_open(line, merge, said)
        pending.clear()
        starts += 1
        yield _started(line, said, starts)
      case syncer_events.AdmitLearner():
        yield _joined(line, said, numbers)
      case syncer_events.LogDecision(kind='joined'):
        pass  # The `Greet` line says more.
      case syncer_events.LogDecision():
        yield _record(line, said)
      case syncer_events.End():
        words = (
          f'the run is over at step {said.step}, {said.closed_round} rounds'
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


def _unexplained(said: tape_events.Publish) -> syncer_events.Merge:
  """Returns an empty merge for a round without a line on its window."""
  return syncer_events.Merge(
    said.round,
    said.fragment,
    said.version,
    said.step,
    said.shares,
    0.0,
    0.0,
    'no Merge line',
  )


def _left_open(
  line: LoggedEvent, merge: syncer_events.Merge, started: tape_events.Started
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
  line: LoggedEvent, said: tape_events.Started, starts: int
) -> TimelineRow:
  kind, words = 'start', f'starts, {len(said.versions)} fragments'
  if starts > 1:
    kind, words = (
      'restart',
      f'start {starts}, goes on after round {said.closed_round}',
    )
  behind = [
    p
    for p, (v, outer) in enumerate(zip(said.versions, said.outer_versions))
    if v != outer
  ]
  if behind:
    words += f'; outer state of an older version: fragments {behind}'
  return TimelineRow(line.time_s, kind, 'syncer', frozenset(), words)


def _joined(
  line: LoggedEvent, said: syncer_events.AdmitLearner, numbers
) -> TimelineRow:
  process = numbers[said.learner, process_of(said.incarnation)]
  session = said.incarnation % (1 << SESSION_BITS)
  words = f'joins: process {process}, session {session}, step {said.step}'
  if said.position:
    words += f', its batch {said.position}'
  return _learners(line, 'joined', said.learner, words)


def _record(line: LoggedEvent, said: syncer_events.LogDecision) -> TimelineRow:
  if said.learner < 0:
    return TimelineRow(
      line.time_s,
      said.kind,
      'syncer',
      frozenset(),
      f'{said.kind}: {said.reason}',
    )
  kind = said.kind
  if kind == 'left' and not said.reason.startswith('goodbye'):
    kind = 'lost'
  return _learners(line, kind, said.learner, f'{kind}: {said.reason}')


def _of_learners(tapes: EventLogs) -> Iterator[TimelineRow]:
  numbers = process_numbers(tapes)
  for learner, lines in tapes.learners.items():
    for line in lines:
      said = line.said
      number = numbers[learner, said.process]
      words = f'process {number}: {_words(said, learner, numbers)}'
      yield _learners(line, type(said).__name__.lower(), learner, words)


def _words(said, learner: int, numbers) -> str:
  match said:
    case tape_events.Begin():
      source = said.source
      words = f'trains from batch {said.position}, state of {source.kind}'
      if source.kind != tape_events.SEED.kind:
        donor = learner if source.learner is None else source.learner
        number = numbers.get((donor, source.process), '?')
        words += f' (learner {donor}, process {number}, step {source.step})'
      return words
    case tape_events.Snapshot():
      return (
        f'step {said.step}: offers p{said.fragment} against '
        f'v{said.base_version}, round {said.round}'
      )
    case tape_events.Apply():
      carry = ', carries its progress on' if said.carry else ''
      return (
        f'step {said.step}: takes in p{said.fragment} v{said.version}{carry}'
      )
    case tape_events.Progress():
      return f'step {said.step}: the schedule is at {said.progress}'
    case tape_events.Save():
      return f'step {said.step}: its state is copied'
    case tape_events.Cease():
      return f'ceases after step {said.step}'
    case tape_events.Leave():
      return f'leaves after step {said.step}: {said.reason}'
  raise TypeError(f'Not of a learner: {said!r}.')


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
  found: Sequence[TimelineRow],
  learner: int | None,
  from_s: float,
  to_s: float,
  kinds: frozenset[str],
) -> list[TimelineRow]:
  """Returns the rows asked for; details only for one learner, or by kind."""
  return [
    each
    for each in found
    if from_s <= each.time_s <= to_s
    and (learner is None or learner in each.learners)
    and (each.kind in kinds if kinds else True)
    and (each.kind not in DETAILS or learner is not None or bool(kinds))
  ]


def text(shown: Sequence[TimelineRow]) -> Iterator[str]:
  """Yields the rows as lines of `COLUMNS`."""
  for each in shown:
    left = f'{each.time_s:9.2f}  {each.who:<11}'
    for line in textwrap.wrap(each.words, COLUMNS - LEFT) or ['']:
      yield f'{left}{line}'
      left = ' ' * LEFT
