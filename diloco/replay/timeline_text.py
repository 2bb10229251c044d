# SPDX-License-Identifier: Apache-2.0
"""The timeline as text of 100 columns, and a run's summary."""

import collections
import re
import statistics
import textwrap
from collections.abc import Iterator, Sequence

from diloco.protocol.syncer import events as syncer_events
from diloco.replay.timeline import (
  DEATHS,
  ROUND,
  TimelineRow,
  process_numbers,
  timeline_rows,
)
from diloco.run.event_log import EventLogs

COLUMNS = 100
LEFT = 22  # Columns for the time and the subject.
WIDE_MAX = 3  # Learners with share, age and bar in their column;
NARROW_MAX = 8  # with bar and share; beyond it a bar only,
BARS_MAX = 48  # as many as fit.
DEATHS_MAX = 8  # Listed in the summary.
REFUSALS = ('refused', 'zombie', 'pull_failed', 'stale')
EVERYONE = 'everyone is in'
LEVELS = '▁▂▃▄▅▆▇█'


def learner_ids(tapes: EventLogs) -> list[int]:
  """Returns all learners that ever joined or wrote a tape, ascending."""
  greeted = {
    line.said.learner
    for line in tapes.syncer
    if isinstance(line.said, syncer_events.AdmitLearner)
  }
  return sorted(greeted | tapes.learners.keys())


def timeline(
  shown: Sequence[TimelineRow], learners: Sequence[int]
) -> Iterator[str]:
  """Yields a line for each row; rounds have a column for each learner."""
  if any(each.merge for each in shown):
    yield _header(learners)
  for each in shown:
    if each.merge is not None:
      yield _round(each, learners)
      continue
    words = textwrap.wrap(each.words, COLUMNS - LEFT) or ['']
    yield f'{_left(each)}{words[0]}'
    for rest in words[1:]:
      yield ' ' * LEFT + rest


def _left(each: TimelineRow) -> str:
  return f'{each.time_s:9.2f}  {each.who:<11}'


def _header(learners: Sequence[int]) -> str:
  left = f'{"s":>9}  {"":<11}{"p":>3}{"v":>5}{"t":>7}  '
  width = _cell_width(learners)
  if not learners:
    return left.rstrip()
  if width == 1:
    names = f'learners {learners[0]} … {learners[-1]}'
  else:
    prefix = 'learner ' if width > len('learner 99') else 'm'
    names = ''.join(f'{f"{prefix}{m}":<{width}}' for m in learners)
  return f'{left}{names}'.rstrip()


def _round(each: TimelineRow, learners: Sequence[int]) -> str:
  merge = each.merge
  shares = {share.learner: share for share in merge.shares}
  width = _cell_width(learners)
  cells = ''.join(
    f'{_cell(shares.get(m), merge, width):<{width}}'
    for m in learners[:BARS_MAX]
  )
  left = f'{_left(each)}{merge.fragment:>3}{merge.version:>5}{merge.step:>7}  '
  reason = _brief(merge.reason)
  return f'{left}{cells} {reason}'[:COLUMNS].rstrip()


def _brief(reason: str) -> str:
  """Shortens the reason why a window ended; unknown reasons are unchanged."""
  if reason == EVERYONE:
    return 'all in'
  window = re.fullmatch(r'window over, (\d+)/\d+ offers, (\d+) live', reason)
  return f'{window[1]} of {window[2]} live' if window else reason


def _cell_width(learners: Sequence[int]) -> int:
  if len(learners) <= WIDE_MAX:
    return 13
  return 6 if len(learners) <= NARROW_MAX else 1


def _cell(
  share: syncer_events.Share | None, merge: syncer_events.Merge, width: int
) -> str:
  """Formats a share: bar, percent, age of the offer; * marks an older base."""
  if share is None:
    return '·'
  bar = _bar(share.weight)
  if width == 1:
    return bar
  stale = '*' if share.base_version < merge.version - 1 else ''
  percent = f'{bar}{100 * share.weight:3.0f}%{stale}'
  return percent if width == 6 else f'{percent} {_seconds(share.age_s)}'


def _bar(fraction: float) -> str:
  """Returns one character of eight heights."""
  return LEVELS[min(int(fraction * len(LEVELS)), len(LEVELS) - 1)]


def _seconds(seconds: float) -> str:
  return f'{seconds:.2f}s' if seconds < 10 else f'{seconds:.0f}s'


# The summary -----------------------------------------------------------------


def summary(tapes: EventLogs) -> Iterator[str]:
  """Yields one screen: rounds, merges of each learner, deaths."""
  found = timeline_rows(tapes)
  merges = [each.merge for each in found if each.kind == ROUND]
  yield from _rounds(found, merges)
  yield ''
  yield from _table(tapes, found, merges)
  yield ''
  yield from _deaths(found)
  for path in tapes.torn:
    yield f'{path}: the last line is torn, left out'


def _rounds(found: Sequence[TimelineRow], merges) -> Iterator[str]:
  if not merges:
    yield 'no round has closed'
    return
  times_s = [each.time_s for each in found if each.kind == ROUND]
  took_s = times_s[-1] - times_s[0]
  rate = f', {(len(merges) - 1) / took_s:.2f} per second' if took_s else ''
  complete = sum(merge.reason == EVERYONE for merge in merges)
  merged = statistics.fmean(len(merge.shares) for merge in merges)
  ended = any(each.kind == 'end' for each in found)
  yield (
    f'{len(merges)} rounds in {took_s:.1f} s{rate}, to step {merges[-1].step}; '
    f'{merged:.2f} learners merged on average'
  )
  yield (
    f'window: all offers in for {complete} rounds; medians '
    f'{_median(m.quorum_s for m in merges)} to quorum, '
    f'{_median(m.grace_s for m in merges)} of grace'
  )
  if not ended:
    yield 'the run has not come to its end'


def _median(values) -> str:
  return f'{statistics.median(values):.3f} s'


def _table(
  tapes: EventLogs,
  found: Sequence[TimelineRow],
  merges: Sequence[syncer_events.Merge],
) -> Iterator[str]:
  yield (
    f'{"learner":<9}{"merged":>7}  {"of the rounds":<22}{"weight":>7}'
    f'{"age":>8}{"steps":>8}{"processes":>11}{"deaths":>8}{"refused":>9}'
  )
  shares = collections.defaultdict(list)
  for share in (share for merge in merges for share in merge.shares):
    shares[share.learner].append(share)
  processes = collections.Counter(m for m, _ in process_numbers(tapes))
  counts = collections.Counter(
    (m, each.kind) for each in found for m in each.learners
  )
  for m in learner_ids(tapes):
    mine = shares[m]
    part = len(mine) / max(len(merges), 1)
    weight = statistics.fmean(s.weight for s in mine) if mine else 0.0
    age_s = statistics.fmean(s.age_s for s in mine) if mine else 0.0
    steps = statistics.fmean(s.c_steps for s in mine) if mine else 0.0
    refused = sum(counts[m, kind] for kind in REFUSALS)
    yield (
      f'{m:<9}{len(mine):>7}  {"█" * round(16 * part):·<16}{part:5.0%} '
      f'{weight:7.1%}{_seconds(age_s):>8}{steps:>8.1f}'
      f'{processes[m]:>11}{counts[m, "lost"]:>8}{refused:>9}'
    )


def _deaths(found: Sequence[TimelineRow]) -> Iterator[str]:
  """Yields lost learners and starts of the syncer, with their times."""
  lost = [each for each in found if each.kind in DEATHS]
  many = {0: 'no deaths', 1: '1 death:'}
  yield many.get(len(lost), f'{len(lost)} deaths:')
  for each in lost[:DEATHS_MAX]:
    yield f'{_left(each)}{each.words}'[:COLUMNS]
  if len(lost) > DEATHS_MAX:
    yield f'{"…":>9}  and {len(lost) - DEATHS_MAX} more, --kind=lost,restart'
