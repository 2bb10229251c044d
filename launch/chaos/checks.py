# SPDX-License-Identifier: Apache-2.0
"""Checks of what any run must satisfy, read from its folder.

Each returns its findings, each a sentence with the values; none is good.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import rich.table

from diloco.metrics.token_ledger import TokenCounts
from diloco.pages import text_tables
from launch.chaos.live_run import WrittenStep
from launch.supervisor import ProcessEvent

# Steps that a process may have made without recording them when it was killed:
# one at whose boundary it offers, and the one before, which is recorded after
# it.
UNWRITTEN_STEPS_MAX = 2
SHOWN_MAX = 5  # Findings of one check; all of them are in the JSON file.

LEFT = ('exited with code 0', 'exited with code 143', 'died of SIGTERM')
# So JAX ends a host that was told to leave, and whose other host was as well,
# but had not started far enough to do more than die of it.
ABORTED = 'died of SIGABRT'


@dataclasses.dataclass(frozen=True)
class Check:
  """One condition that must hold."""

  name: str
  findings: Sequence[str]  # None where it holds.
  note: str = ''  # What was measured, good or bad.


def table(title: str, checks: Sequence[Check]) -> rich.table.Table:
  """Returns a row for each check."""
  rows = []
  for check in checks:
    found = [check.note] if check.note else []
    found += check.findings[:SHOWN_MAX]
    if (more := len(check.findings) - SHOWN_MAX) > 0:
      found.append(f'and {more} more')
    holds = 'NO' if check.findings else 'yes'
    rows.append((check.name, holds, '\n'.join(found)))
  return text_tables.table(title, ('check', 'holds', 'found'), rows, left=3)


def versions(tape: Iterable[Mapping]) -> list[str]:
  """The version of each fragment rises by one per close, and never falls."""
  findings, last = [], {}
  for line in closed(tape):
    p, version = line['fragment'], line['version']
    before = last.get(p, 0)
    if version != before + 1:
      findings.append(
        f'fragment {p}: version {version} after {before}, in round '
        f'{line["round"]}'
      )
    last[p] = version
  return findings


def whole_steps(tape: Iterable[Mapping], tokens_per_step: int) -> list[str]:
  """A contribution has c_steps · tokens_per_step tokens, of ≥ 1 step."""
  return [
    f'round {line["round"]}: learner {share["learner"]} is merged with '
    f'{share["c_tokens"]} tokens of {share["c_steps"]} steps of '
    f'{tokens_per_step}'
    for line in closed(tape)
    for share in line['shares']
    if share['c_steps'] < 1
    or share['c_tokens'] != share['c_steps'] * tokens_per_step
  ]


def merged_once(tape: Iterable[Mapping]) -> list[str]:
  """No two merges of one (learner, incarnation, fragment, base version)."""
  findings, seen = [], {}
  for line in closed(tape):
    for share in line['shares']:
      key = (
        share['learner'],
        share['incarnation'],
        line['fragment'],
        share['base_version'],
      )
      if key in seen:
        findings.append(
          f'learner {key[0]}, incarnation {key[1]}, fragment {key[2]}, base '
          f'version {key[3]}: merged in rounds {seen[key]} and {line["round"]}'
        )
      seen[key] = line['round']
  return findings


def tokens_balance(
  tape: Iterable[Mapping],
  steps: Mapping[int, Sequence[WrittenStep]],
  tokens_per_step: int,
) -> list[str]:
  """Per learner and fragment, no more tokens are merged than were trained.

  A step has progress in every fragment, so each fragment has a balance of its
  own. What a killed process had not written yet is allowed for.
  """
  merged = collections.Counter()
  for line in closed(tape):
    for share in line['shares']:
      merged[share['learner'], line['fragment']] += share['c_tokens']
  findings = []
  for (m, p), tokens in sorted(merged.items()):
    many = steps.get(m, ())
    processes = sum(begins_process(many, i) for i in range(len(many)))
    most_steps = len(many) + UNWRITTEN_STEPS_MAX * processes
    if tokens > most_steps * tokens_per_step:
      findings.append(
        f'learner {m}, fragment {p}: {tokens} tokens merged, at most '
        f'{most_steps * tokens_per_step} trained'
      )
  return findings


def tokens_explained(rows: Mapping[tuple[int, int], TokenCounts]) -> list[str]:
  """Trained = merged + overwritten + lost + pending, per learner and fragment.

  Args:
    rows: of the token ledger, by learner and fragment.
  """
  return [
    f'learner {m}, fragment {p}: {row.unexplained:+} of {row.trained} tokens '
    f'unexplained; {row}'
    for (m, p), row in sorted(rows.items())
    if row.unexplained
  ]


def exits(events: Iterable[ProcessEvent], is_over: bool) -> list[str]:
  """Every process was killed, stopped, or ended with 0 as the run was over.

  Args:
    events: in the order in which they happened.
    is_over: the run came to its end.
  """
  findings, killed, stopped = [], set(), set()
  left = collections.defaultdict(set)  # Processes of a learner that have left.
  for event in events:
    learner = event.process.partition('.')[0]
    match event.event:
      case 'started':  # The pid may be one that was in use before.
        killed.discard(event.pid)
        stopped.discard(event.pid)
        left.pop(learner, None)
      case 'killed':
        killed.add(event.pid)
      case 'stopped' if event.detail.startswith('SIGKILL'):
        killed.add(event.pid)  # As another process of its role is dead.
      case 'stopped':
        stopped.add(event.pid)
      case 'exited':
        # Of several hosts, the last exit tells of the first to die, if that
        # is another one, whose own exit was judged.
        told = event.detail.partition(';')[0]
        how = re.sub(rf'^{re.escape(learner)}(\.\d+)? ', '', told)
        ours = event.pid in killed and how == 'died of SIGKILL'
        leaves = event.pid in stopped and (
          how in LEFT or (left[learner] and how == ABORTED)
        )
        if event.pid in stopped and how in LEFT:
          left[learner].add(event.pid)
        if not (ours or leaves or (is_over and how == LEFT[0])):
          findings.append(f'{event.process} ({event.pid}) {told}')
  return findings


def closed(tape: Iterable[Mapping]) -> Iterator[Mapping]:
  """Yields the lines of the rounds that closed."""
  return (line for line in tape if line['kind'] == 'Publish')


def begins_process(steps: Sequence[WrittenStep], i: int) -> bool:
  """Returns True if a process's first recorded step is at `i`."""
  return i == 0 or steps[i].step <= steps[i - 1].step
