# SPDX-License-Identifier: Apache-2.0
"""Plans a replay from a run's tapes, without arrays.

Of the syncer's tape only merges of closed rounds count. Each names by (learner,
process, own step, fragment, base version) the snapshots that it merged. Of a
process, all lines up to the last such snapshot are needed; of a process that
another took its state from, all lines up to that point.
"""

import collections
import dataclasses
from collections.abc import Mapping

from diloco.protocol.incarnation import process_of
from diloco.protocol.syncer import events as syncer_events
from diloco.run import tape_events
from diloco.run.tape_events import EventLogs, LoggedEvent

BEHIND = 'behind'  # Kind of a record; see `protocol/syncer/recovery.py`.
Process = tuple[int, int]  # (learner, process).
Named = tuple[int, int, int]  # (fragment, version, CRC): a state in the run.
# (fragment, CRC): Θ_p by its content, which two versions may share: a fragment
# that was lost has got the bytes of an older version.
Bytes = tuple[int, int]


class NotReplayable(Exception):
  """The tapes lack something that a replay needs; says which and what."""


@dataclasses.dataclass(frozen=True)
class Script:
  """The actions of one process, as far as the replay needs them."""

  begin: tape_events.Begin  # Where it took its state from.
  lines: tuple[LoggedEvent, ...]  # In order; the last one is needed.
  offered: frozenset[int]  # Indices of the snapshots that are merged.
  # Index of a `Save` -> processes that started from that copy.
  saves: Mapping[int, int]

  @property
  def steps(self) -> int:
    """The number of inner steps."""
    return self.lines[-1].said.step - self.begin.step


@dataclasses.dataclass(frozen=True)
class ReplayPlan:
  """Everything that a replay does.

  Attributes:
    merges: number of a `Merge` line that counts -> for each of its shares, the
      process and the index of the snapshot in its script.
    scripts: by process.
    sources: by process that took over another's state: the other process, and
      the index of the `Save` in its script.
    applied: how often each Θ_p is needed by a process.
    resumed: the states that a syncer's process resumes.
  """

  syncer: tuple[LoggedEvent, ...]
  merges: dict[int, tuple[tuple[Process, int], ...]]
  scripts: dict[Process, Script]
  sources: dict[Process, tuple[Process, int]]
  applied: collections.Counter[Bytes]
  resumed: frozenset[Named]

  @property
  def steps(self) -> int:
    """Inner steps of all processes together."""
    return sum(script.steps for script in self.scripts.values())


def make_plan(tapes: EventLogs) -> ReplayPlan:
  """Plans backwards, from the rounds that closed to what they merged.

  Raises:
    NotReplayable: a snapshot, a process or its `Begin` is missing.
  """
  if not any(isinstance(x.said, tape_events.Started) for x in tapes.syncer[:1]):
    raise NotReplayable(f'{tapes.workdir.tape}: does not begin with Started')
  behind = [
    line for line in tapes.syncer if getattr(line.said, 'kind', None) == BEHIND
  ]
  if behind:
    raise NotReplayable(
      f'{tapes.workdir.tape}:{behind[0].number}: a shard came back with an '
      'older outer state, and no line says with which'
    )
  lengths = sorted(
    {
      line.said.total_steps
      for line in tapes.syncer
      # Older tapes don't say.
      if isinstance(line.said, tape_events.Started) and line.said.total_steps
    }
  )
  if len(lengths) > 1:
    raise NotReplayable(
      f'{tapes.workdir.tape}: the run was extended from {lengths[0]} to '
      f'{lengths[-1]} steps, and the outer step follows one length'
    )
  processes = _Processes(tapes)
  merges = {
    line.number: tuple(
      processes.snapshot(line, share) for share in line.said.shares
    )
    for line in _merges_that_count(tapes.syncer)
  }
  scripts = processes.scripts(merges)
  return ReplayPlan(
    syncer=tapes.syncer,
    merges=merges,
    scripts=scripts,
    sources=processes.sources,
    applied=_applied(scripts),
    resumed=_resumed(tapes.syncer),
  )


def _merges_that_count(lines: tuple[LoggedEvent, ...]) -> list[LoggedEvent]:
  """Returns the merges of rounds that closed.

  A syncer that was killed may have merged without closing. It may also have
  closed without a line that says so; then the next process's start does.
  """
  pending: dict[int, LoggedEvent] = {}  # By fragment.
  found = []
  for line in lines:
    said = line.said
    match said:
      case syncer_events.Merge():
        pending[said.fragment] = line
      case tape_events.Publish():
        merge = pending.pop(said.fragment, None)
        if merge is None or merge.said.version != said.version:
          raise NotReplayable(
            f"line {line.number} of the syncer's tape: round {said.round} "
            'closed, and no line before it says what it merged'
          )
        found.append(merge)
      case tape_events.Started():
        found += [
          merge
          for p, merge in pending.items()
          if said.versions[p] == merge.said.version
        ]
        pending.clear()
  return sorted(found, key=lambda line: line.number)


class _Processes:
  """The learners' tapes, process by process."""

  def __init__(self, tapes: EventLogs):
    self._tapes = tapes
    self._lines: dict[Process, list[LoggedEvent]] = collections.defaultdict(
      list
    )
    for learner, lines in tapes.learners.items():
      for line in lines:
        self._add(learner, line)
    self._begins = {
      process: line.said
      for process, lines in self._lines.items()
      for line in lines
      if isinstance(line.said, tape_events.Begin)
    }
    sources = {  # By process that took over another's state.
      process: begin.source
      for process, begin in self._begins.items()
      if begin.source.kind != tape_events.SEED.kind
    }
    for process, source in sources.items():
      self._place_save(process, source)
    self.sources = {
      process: self._find_save(process, source)
      for process, source in sources.items()
    }
    self._snapshots = {
      _name(process, line.said): i
      for process, lines in self._lines.items()
      for i, line in enumerate(lines)
      if isinstance(line.said, tape_events.Snapshot)
    }

  def snapshot(self, merge: LoggedEvent, share: syncer_events.Share):
    """Returns the process and the line index of a share's snapshot."""
    process = share.learner, process_of(share.incarnation)
    fragment = merge.said.fragment
    name = (*process, share.step, fragment, share.base_version)
    if name not in self._snapshots:
      raise NotReplayable(
        f'round {merge.said.round} merged learner {share.learner}, process '
        f'{process[1]}, its step {share.step}, fragment {fragment} against '
        f'version {share.base_version}: '
        f'{self._tapes.workdir.learner_tape(share.learner)} has no such '
        'snapshot'
      )
    return process, self._snapshots[name]

  def scripts(self, merges) -> dict[Process, Script]:
    """Returns the scripts of all processes that the merges need,
    transitively.
    """
    offered = collections.defaultdict(set)
    for process, index in (x for shares in merges.values() for x in shares):
      offered[process].add(index)
    ends = {process: max(indices) for process, indices in offered.items()}
    saves = collections.defaultdict(collections.Counter)
    pending = list(ends)
    while pending:
      process = pending.pop()
      if process not in self._begins:
        raise NotReplayable(
          f'{self._path(process)}: process {process[1]} has no Begin'
        )
      if process not in self.sources:
        continue
      donor, index = self.sources[process]
      saves[donor][index] += 1
      if donor not in ends:
        pending.append(donor)
      ends[donor] = max(ends.get(donor, 0), index)
    return {
      process: Script(
        self._begins[process],
        tuple(self._lines[process][: end + 1]),
        frozenset(offered[process]),
        saves[process],
      )
      for process, end in ends.items()
    }

  def _add(self, learner: int, line: LoggedEvent):
    lines = self._lines[learner, line.said.process]
    if lines and line.said.step < lines[-1].said.step:
      raise NotReplayable(
        f'{self._tapes.workdir.learner_tape(learner)}:{line.number}: step '
        f'{line.said.step} after step {lines[-1].said.step}'
      )
    lines.append(line)

  def _place_save(self, process: Process, source: tape_events.Source):
    """Adds the line where the state was taken, unless it is there."""
    donor = _donor(process, source)
    if source.kind not in tape_events.SOURCES:
      raise NotReplayable(
        f'{self._path(process)}: process {process[1]} began with a '
        f'{source.kind!r}, must be one of {tape_events.SOURCES}'
      )
    if donor not in self._begins or donor == process or source.step is None:
      raise NotReplayable(
        f'{self._path(process)}: process {process[1]} began with {source}, '
        'and no tape has the beginning of that process'
      )
    if self._find_save(process, source) is not None:
      return
    lines = self._lines[donor]
    end = sum(line.said.step <= source.step for line in lines)
    save = tape_events.Save(source.process, source.step)
    lines.insert(
      end, LoggedEvent(lines[end - 1].number, lines[end - 1].time_s, save)
    )

  def _find_save(
    self, process: Process, source: tape_events.Source
  ) -> tuple[Process, int] | None:
    """Returns where a process took its state from: another process and a
    line.
    """
    donor = _donor(process, source)
    save = tape_events.Save(source.process, source.step)
    found = [i for i, x in enumerate(self._lines[donor]) if x.said == save]
    # At τ = 0 fragments may be applied between a donation and a checkpoint of
    # one boundary: the checkpoint is the later one.
    return (donor, found[-1]) if found else None

  def _path(self, process: Process):
    return self._tapes.workdir.learner_tape(process[0])


def _donor(process: Process, source: tape_events.Source) -> Process:
  learner = process[0] if source.kind == 'checkpoint' else source.learner
  return learner, source.process


def _name(process: Process, said: tape_events.Snapshot):
  """Returns the key that determines a snapshot's bytes.

  Its round is not part of it: the snapshot may be merged in a later one. Two
  with the same key have the same bytes, since taking in a fragment changes its
  base.
  """
  return (*process, said.step, said.fragment, said.base_version)


def _applied(scripts: Mapping[Process, Script]) -> collections.Counter[Bytes]:
  found = collections.Counter()
  for script in scripts.values():
    source = script.begin.source
    if source.kind == 'peer':
      found.update(enumerate(source.crcs))
    found.update(
      (line.said.fragment, line.said.crc)
      for line in script.lines
      if isinstance(line.said, tape_events.Apply)
    )
  return found


def _resumed(lines: tuple[LoggedEvent, ...]) -> frozenset[Named]:
  found = set()
  for line in lines:
    if isinstance(line.said, tape_events.Started):
      found.update(states_of(line.said.versions, line.said.crcs))
      found.update(states_of(line.said.outer_versions, line.said.outer_crcs))
  return frozenset(found)


def states_of(versions, crcs) -> list[Named]:
  """Returns [(fragment, version, CRC), …]."""
  return [(p, v, crc) for p, (v, crc) in enumerate(zip(versions, crcs))]
