# SPDX-License-Identifier: Apache-2.0
"""Interprets the lines of a run's tape and of its launcher's events."""

from collections.abc import Mapping, Sequence

from diloco.metrics import names
from diloco.reports.recorded_run import Round, Share
from diloco.studies import run_history
from diloco.studies.run_history import Life

LINE = (names.TIME, 'kind')
EVENT = (names.TIME, 'process', 'event', 'detail')
# What a line must say to be taken.
MERGE = ('round', 'quorum_s', 'grace_s', 'reason')
PUBLISH = ('round', 'step', 'version', 'shares', 'sync_s')
SHARE = ('learner', 'weight', 'age_s', 'base_version')


def rounds(
  tape: Sequence[Mapping], begin_s: float
) -> tuple[tuple[Round, ...], list[str]]:
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


def _round(line: Mapping, merge: Mapping | None, begin_s: float) -> Round:
  """A merge that no line tells of died with a syncer."""
  return Round(
    number=line['round'],
    at_s=line[names.TIME] - begin_s,
    step=line['step'],
    shares=tuple(
      Share(
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
          of_process[-1] = run_history.ended(of_process[-1], event, at_s)
      case 'paused':
        paused.setdefault(process, at_s)
      case 'went on':
        go_on(process, at_s)
  for process in list(paused):
    go_on(process, until_s)
  return {name: tuple(each) for name, each in found.items()}, tuple(pauses)
