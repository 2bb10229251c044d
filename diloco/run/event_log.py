# SPDX-License-Identifier: Apache-2.0
"""Event logs: what their lines can say, how they are written and read.

The name of a class is the kind of its line.

The syncer's event log has the machine's decisions, `Started` and `Worked`. A
learner's event log has one line per event that changes its bits. In both, what
is not in the event log follows from what is: that is what makes a run
replayable.

A learner's lines lie at its inner-step boundaries: `step` is how many inner
steps it had made, `tokens` how many tokens these had. Lines of one boundary
stand in the order in which the loop performed them.
"""

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from diloco.metrics import files, jsonl
from diloco.metrics.goodput import LearnerWork
from diloco.metrics.jsonl import CorruptLine, parts, read_jsonl
from diloco.metrics.workdir import Workdir, learner_name
from diloco.protocol import messages
from diloco.protocol.learner import events as learner_events
from diloco.protocol.syncer import events as syncer_events

# Of the syncer ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Started:
  """A syncer's process continues from these states.

  The tuples have one item per fragment. Fragment p has Θ_p at `versions[p]`,
  whose bytes have the CRC `crcs[p]`; its outer optimizer's state and residual
  are those that belonged to `outer_versions[p]`, when Θ_p had the CRC
  `outer_crcs[p]`. A new run has version 0 everywhere. `total_steps` is the
  run's length as far as this process knows it; 0 in older tapes.
  """

  closed_round: int
  versions: tuple[int, ...]
  crcs: tuple[int, ...]
  outer_versions: tuple[int, ...]
  outer_crcs: tuple[int, ...]
  total_steps: int = 0


class Publish(syncer_events.Publish):
  """A round has closed."""

  crc: int  # CRC of Θ_p at `version`.


@dataclasses.dataclass(frozen=True)
class Worked:
  """The learners' work so far, from which goodput is computed.

  Written after each close, and when a session begins or ends.
  """

  begin_s: float  # When the first learner was ready, since the epoch.
  learners: tuple[LearnerWork, ...]


# Of a learner ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Source:
  """The origin of a process's parameters and inner state.

  'seed': both as the configuration gives them; nothing else is set.
  'checkpoint': all that `process` of the same learner had at its `Save` of
  `step`, or, if it has no such line, when all of that boundary was done.
  'slice': the same, out of the memory of the slices that were left.
  'peer': the inner state as `process` of `learner` had it there; θ and the
  bases are Θ at `versions`, whose bytes have the CRCs `crcs`.
  'peer_checkpoint': the same, read from its checkpoint.
  """

  kind: str
  learner: int | None = None
  process: int | None = None
  step: int | None = None
  versions: tuple[int, ...] = ()
  crcs: tuple[int, ...] = ()


SEED = Source('seed')
OF_ITS_OWN = ('checkpoint', 'slice')  # All of the same learner's.
SOURCES = ('seed', 'checkpoint', 'slice', 'peer', 'peer_checkpoint')


@dataclasses.dataclass(frozen=True)
class Machine:
  """The facts besides the configuration that affect the bits of a step."""

  jax: str  # JAX's version.
  platform: str  # 'cpu', 'gpu', 'tpu'.
  kind: str  # Device kind.
  fsdp: int  # The mesh.
  tensor: int
  cores: int
  threads: int  # NPROC; 0: as many as there are cores.
  xla_flags: str
  expert: int = 1  # Mesh axis; missing on older tapes.
  hosts: int = 1  # Processes of the learner; missing on older tapes.
  processor: str = ''  # Model and cache of a CPU; missing on older tapes.
  batch: int = 0  # Rows of a step; 0 on older tapes: as configured.
  accumulate: int = 1  # Parts of the batch; missing on older tapes.
  context: int = 1  # Mesh axis; missing on older tapes.
  slices: int = 1  # Likewise.


@dataclasses.dataclass(frozen=True)
class _AtBoundary:
  process: int
  step: int
  tokens: int


@dataclasses.dataclass(frozen=True)
class BeginLogged(_AtBoundary):
  """Bootstrap is complete; `rows` of the data shard have been taken.

  Lines before it apply to the parameters of `source`: there is no progress yet,
  so `Apply` sets θ_p to Θ_p whatever the blend rule.
  """

  rows: int
  source: Source
  machine: Machine


class SnapshotLogged(messages.OfferTerms, kw_only=True):
  """The fragment was copied, to be offered against the base it then had.

  A later round than its own may merge it.
  """

  process: int
  tokens: int
  handle: int
  c_steps: int = 0  # This and the next are missing on older tapes.
  c_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class ApplyLogged(_AtBoundary):
  """Θ_p of `version` was blended into θ_p and is the new base."""

  fragment: int
  version: int
  crc: int  # CRC of its bytes.
  carry: bool  # This and the next as in `learner.events.Apply`.
  handle: int
  merged_tokens: int
  overwritten_tokens: int


@dataclasses.dataclass(frozen=True)
class Progress(_AtBoundary):
  """The next step's schedule is at `progress`.

  Written only if that is not one more than at the step before (initially 0).
  """

  progress: int


@dataclasses.dataclass(frozen=True)
class SaveLogged(_AtBoundary):
  """Parameters, inner state and bases were copied for another process."""


@dataclasses.dataclass(frozen=True)
class CeaseLogged(_AtBoundary):
  """No more inner steps follow."""


@dataclasses.dataclass(frozen=True)
class LeaveLogged(_AtBoundary):
  """The process ends; if it was stopped, says what came of its last steps."""

  reason: str


# The words of the lines are the tape's own: a class can be renamed.
SYNCER_KINDS = {
  'Started': Started,
  'Greet': syncer_events.AdmitLearner,
  'Merge': syncer_events.Merge,
  'Publish': Publish,
  'Record': syncer_events.LogDecision,
  'Reform': syncer_events.LogReformed,
  'End': syncer_events.End,
  'Worked': Worked,
}
LEARNER_KINDS = {
  'Begin': BeginLogged,
  'Snapshot': SnapshotLogged,
  'Apply': ApplyLogged,
  'Progress': Progress,
  'Save': SaveLogged,
  'Cease': CeaseLogged,
  'Leave': LeaveLogged,
}
_WORDS = {cls: word for word, cls in (SYNCER_KINDS | LEARNER_KINDS).items()}


def kind_of(event) -> str:
  """Returns the word for an event on a line of an event log."""
  return _WORDS.get(type(event), type(event).__name__)


# Written and read ------------------------------------------------------------


class SealedLines:
  """Appends lines to an event log, each sealed by a checksum."""

  def __init__(self, path: pathlib.Path):
    self._lines = jsonl.JsonLines(path)

  def append(self, event):
    """Appends an instance of one of the classes above."""
    self.append_line(line_of(event))

  def append_line(self, line: dict):
    self._lines.append(files.seal(json.dumps(line).encode()))

  def close(self):
    self._lines.close()


def line_of(event) -> dict:
  """Returns the event log line of an instance of one of the classes above."""
  return {'time_s': time.time(), 'kind': kind_of(event), **files.plain(event)}


def closing_line(effect: syncer_events.Publish, crc: int) -> Publish:
  """Returns the event log line of a close; `crc` is that of the new Θ_p."""
  # Its fields alone: the instance also caches what was derived from them.
  fields = {x.name: getattr(effect, x.name) for x in dataclasses.fields(effect)}
  return Publish(**fields, crc=crc)


class SyncerEventLog(SealedLines):
  """The syncer's event log."""

  def __init__(self, path: pathlib.Path):
    super().__init__(path)
    self._path = path

  def complete(self, published: dict):
    """Adds the last close, if its process died before it was in the event log.

    Args:
      published: its line, from the ledger.
    """
    rounds = (
      line['round']
      for line in jsonl.from_the_end(self._path)
      if line.get('kind') == published['kind']
    )
    if next(rounds, 0) < published['round']:
      self.append_line(published)

  def newest_first(self) -> Iterator[dict]:
    """Yields its lines, newest first; logs and skips unreadable ones."""
    return jsonl.from_the_end(self._path)

  def write(self, effect: syncer_events.Effect, crcs: Sequence[int]) -> float:
    """Writes `effect` if it is a decision; the others follow from those.

    Args:
      crcs: CRCs of the bytes of Θ now, by fragment.

    Returns:
      The time on its line, otherwise now; in seconds since the epoch.
    """
    match effect:
      case syncer_events.Publish():
        line = line_of(closing_line(effect, crcs[effect.fragment]))
      case (
        syncer_events.AdmitLearner()
        | syncer_events.Merge()
        | syncer_events.LogDecision()
        | syncer_events.LogReformed()
        | syncer_events.End()
      ):
        line = line_of(effect)
      case _:
        return time.time()
    self.append_line(line)
    return line['time_s']


class LearnerEventLog(SealedLines):
  """One process's lines in the event log of its learner.

  The train loop itself writes them: a line of some 150 bytes takes 15 µs, 2 µs
  of them for the write, and it must be there before the offer that it explains.

  Args:
    process: returns the process's number, see `protocol.incarnation`. It is
      called until training begins: the syncer, which may make the process take
      a newer number, has admitted it before its first line.
  """

  def __init__(
    self, path: pathlib.Path, process: Callable[[], int], machine: Machine
  ):
    super().__init__(path)
    self._ask_process = process
    self._process = 0  # 0: it has not begun.
    self._machine = machine
    self._boundary = 0, 0  # Own steps, and their tokens.
    self._expected = 0  # Progress of the next step, if nothing intervenes.

  def at(self, step: int, tokens: int):
    """Sets the boundary of the lines that follow: own steps, their tokens."""
    self._boundary = step, tokens

  def begin(self, rows: int, source: Source):
    self._process = self._ask_process()
    self._append(BeginLogged, rows, source, self._machine)

  def snapshot(self, effect: learner_events.Snapshot):
    """Records a snapshot, before it is offered."""
    step, tokens = self._boundary
    self.append(
      SnapshotLogged(
        **(effect.facts(messages.OfferTerms) | {'step': step}),
        process=self._process,
        tokens=tokens,
        handle=effect.handle,
      )
    )

  def apply(self, effect: learner_events.Apply, crc: int):
    self._append(
      ApplyLogged,
      effect.fragment,
      effect.version,
      crc,
      effect.carry,
      effect.handle,
      effect.merged_tokens,
      effect.overwritten_tokens,
    )

  def progress(self, progress: int):
    """Records the progress of a step, unless it follows from the last one."""
    if progress != self._expected:
      self._append(Progress, progress)
    self._expected = progress + 1

  def save(self):
    self._append(SaveLogged)

  def cease(self):
    self._append(CeaseLogged)

  def leave(self, reason: str):
    """Records the end of a process that has begun."""
    if self._process:
      self._append(LeaveLogged, reason)

  def _append(self, kind: type[_AtBoundary], *fields):
    process = self._process or self._ask_process()
    self.append(kind(process, *self._boundary, *fields))


@dataclasses.dataclass(frozen=True)
class LoggedEvent:
  """One line of an event log."""

  number: int  # In its file, from 1.
  time_s: float  # Since the epoch.
  event: object  # An instance of one of the classes above.


@dataclasses.dataclass(frozen=True)
class EventLogs:
  """All event logs of a run.

  Attributes:
    learners: lines by learner id, of those that have an event log.
    torn: files whose last line is incomplete, and was left out.
  """

  workdir: Workdir
  syncer: tuple[LoggedEvent, ...]
  learners: dict[int, tuple[LoggedEvent, ...]]
  torn: tuple[pathlib.Path, ...]


def read_tapes(workdir: Workdir) -> EventLogs:
  """Reads all event logs of a run.

  Raises:
    FileNotFoundError: the run has no event log.
    Malformed: a line is invalid; names file and line.
  """
  if not parts(workdir.tape):
    raise FileNotFoundError(f'no event log at {workdir.tape}')
  learners = {}
  for path in sorted(workdir.tapes.glob('*.jsonl')):
    number = path.stem.rpartition('-')[2]
    if not number.isdecimal() or path.stem != learner_name(int(number)):
      raise files.MalformedFile(f"{path}: is no learner's, such as learner-0")
    learners[int(number)] = read_tape(path, LEARNER_KINDS, workdir.data)
  paths = [workdir.tape, *(workdir.learner_tape(m) for m in learners)]
  return EventLogs(
    workdir,
    read_tape(workdir.tape, SYNCER_KINDS, workdir.data),
    learners,
    tuple(path for path in paths if _is_torn(path)),
  )


def read_tape(
  path: pathlib.Path, kinds: Mapping[str, type], data: Mapping
) -> tuple[LoggedEvent, ...]:
  """Returns the complete lines of one event log; a torn last one is left out.

  Args:
    data: as `jsonl.renewed` takes it.

  Raises:
    Malformed: another line is not JSON, not of one of `kinds`, or has other
      fields than its kind; names file and line.
  """
  try:
    records = read_jsonl(path)
  except CorruptLine as error:
    raise files.MalformedFile(str(error)) from None
  return tuple(
    _line(f'{path}:{number}', number, jsonl.renewed(record, data), kinds)
    for number, record in enumerate(records, start=1)
  )


def _line(
  where: str, number: int, record: dict, kinds: Mapping[str, type]
) -> LoggedEvent:
  name = record.pop('kind', None)
  if _is_record(name, kinds):
    name, record = 'Record', {'kind': name, **record}
  if name not in kinds:
    raise files.MalformedFile(
      f'{where}: kind {name!r}, must be one of {", ".join(sorted(kinds))}'
    )
  try:
    time_s = files.as_type(record.pop('time_s', None), float, 'time_s')
    event = files.as_type(record, kinds[name], name)
  except ValueError as error:
    raise files.MalformedFile(f'{where}: {error}') from None
  return LoggedEvent(number, time_s, event)


def _is_record(name, kinds: Mapping[str, type]) -> bool:
  """Returns True for a `Record`, whose own kind, as 'joined', is the line's."""
  return 'Record' in kinds and isinstance(name, str) and name.islower()


def _is_torn(path: pathlib.Path) -> bool:
  if not path.exists():
    return False  # It has been rotated, and holds complete lines.
  with path.open('rb') as file:
    if not file.seek(0, os.SEEK_END):
      return False
    file.seek(-1, os.SEEK_END)
    return file.read() != b'\n'
