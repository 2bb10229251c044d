# SPDX-License-Identifier: Apache-2.0
"""Repeats a run in one process, from its event logs, and compares the bytes.

It follows the order of the syncer's event log. A merge needs its snapshots; for
each of them, the process is continued up to that snapshot, and so takes in the
Θ_p that it had by then, which earlier rounds produced.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from diloco.data import pipeline
from diloco.learner.local_delta import LocalDelta
from diloco.learner.programs import LearnerKinds, LearnerPrograms
from diloco.numerics import payload
from diloco.numerics.outer import FragmentState
from diloco.protocol.incarnation import process_of
from diloco.protocol.learner import events as learner_events
from diloco.protocol.syncer import events as syncer_events
from diloco.run import environment, event_log, payload_parts
from diloco.run.event_log import EventLogs, LoggedEvent, Machine
from diloco.run.spec import RunSpec
from diloco.syncer.outer_state import OuterState, OuterStep

BEHIND = 'behind'  # Kind of a record; see `protocol/syncer/recovery.py`.
Process = tuple[int, int]  # (learner, process).
Named = tuple[int, int, int]  # (fragment, version, CRC): a state in the run.
# (fragment, CRC): Θ_p by its content, which two versions may share: a fragment
# that was lost has got the bytes of an older version.
Bytes = tuple[int, int]
Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array.


# The plan: what to do again, made from the event logs, without arrays.
#
# Of the syncer's event log only merges of closed rounds count. Each names by
# (learner, process, own step, fragment, base version) the snapshots that it
# merged. Of a process, all lines up to the last such snapshot are needed; of a
# process that another took its state from, all lines up to that point.


class NotReplayable(Exception):
  """The event logs lack something that a replay needs; says which and what."""


@dataclasses.dataclass(frozen=True)
class Script:
  """The actions of one process, as far as the replay needs them."""

  begin: event_log.BeginLogged  # Where it took its state from.
  lines: tuple[LoggedEvent, ...]  # In order; the last one is needed.
  offered: frozenset[int]  # Indices of the snapshots that are merged.
  # Index of a `Save` -> processes that started from that copy.
  saves: Mapping[int, int]

  @property
  def steps(self) -> int:
    """The number of inner steps."""
    return self.lines[-1].event.step - self.begin.step


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
  if not any(isinstance(x.event, event_log.Started) for x in tapes.syncer[:1]):
    raise NotReplayable(f'{tapes.workdir.tape}: does not begin with Started')
  behind = [
    line for line in tapes.syncer if getattr(line.event, 'kind', None) == BEHIND
  ]
  if behind:
    raise NotReplayable(
      f'{tapes.workdir.tape}:{behind[0].number}: a shard came back with an '
      'older outer state, and no line says with which'
    )
  lengths = sorted(
    {
      line.event.total_steps
      for line in tapes.syncer
      # Older event logs don't say.
      if isinstance(line.event, event_log.Started) and line.event.total_steps
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
      processes.snapshot(line, share) for share in line.event.shares
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
  merges = []
  for line in lines:
    event = line.event
    match event:
      case syncer_events.Merge():
        pending[event.fragment] = line
      case event_log.Publish():
        merge = pending.pop(event.fragment, None)
        if merge is None or merge.event.version != event.version:
          raise NotReplayable(
            f"line {line.number} of the syncer's tape: round {event.round} "
            'closed, and no line before it says what it merged'
          )
        merges.append(merge)
      case event_log.Started():
        merges += [
          merge
          for p, merge in pending.items()
          if event.versions[p] == merge.event.version
        ]
        pending.clear()
  return sorted(merges, key=lambda line: line.number)


class _Processes:
  """The learners' event logs, process by process."""

  def __init__(self, tapes: EventLogs):
    self._tapes = tapes
    self._lines: dict[Process, list[LoggedEvent]] = collections.defaultdict(
      list
    )
    for learner, lines in tapes.learners.items():
      for line in lines:
        self._add(learner, line)
    self._begins = {
      process: line.event
      for process, lines in self._lines.items()
      for line in lines
      if isinstance(line.event, event_log.BeginLogged)
    }
    sources = {  # By process that took over another's state.
      process: begin.source
      for process, begin in self._begins.items()
      if begin.source.kind != event_log.SEED.kind
    }
    for process, source in sources.items():
      self._place_save(process, source)
    self.sources = {
      process: self._find_save(process, source)
      for process, source in sources.items()
    }
    self._snapshots = {
      _name(process, line.event): i
      for process, lines in self._lines.items()
      for i, line in enumerate(lines)
      if isinstance(line.event, event_log.SnapshotLogged)
    }

  def snapshot(self, merge: LoggedEvent, share: syncer_events.Share):
    """Returns the process and the line index of a share's snapshot."""
    process = share.learner, process_of(share.incarnation)
    fragment = merge.event.fragment
    name = (*process, share.step, fragment, share.base_version)
    if name not in self._snapshots:
      raise NotReplayable(
        f'round {merge.event.round} merged learner {share.learner}, process '
        f'{process[1]}, its step {share.step}, fragment {fragment} against '
        f'version {share.base_version}: '
        f'{self._tapes.workdir.learner_tape(share.learner)} has no such '
        'snapshot'
      )
    return process, self._snapshots[name]

  def scripts(self, merges) -> dict[Process, Script]:
    """Returns the scripts of all processes that the merges depend on."""
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
    lines = self._lines[learner, line.event.process]
    if lines and line.event.step < lines[-1].event.step:
      raise NotReplayable(
        f'{self._tapes.workdir.learner_tape(learner)}:{line.number}: step '
        f'{line.event.step} after step {lines[-1].event.step}'
      )
    lines.append(line)

  def _place_save(self, process: Process, source: event_log.Source):
    """Adds the line where the state was taken, unless it is there."""
    donor = _donor(process, source)
    if source.kind not in event_log.SOURCES:
      raise NotReplayable(
        f'{self._path(process)}: process {process[1]} began with a '
        f'{source.kind!r}, must be one of {event_log.SOURCES}'
      )
    if donor not in self._begins or donor == process or source.step is None:
      raise NotReplayable(
        f'{self._path(process)}: process {process[1]} began with {source}, '
        'and no tape has the beginning of that process'
      )
    if self._find_save(process, source) is not None:
      return
    lines = self._lines[donor]
    end = sum(line.event.step <= source.step for line in lines)
    last = lines[end - 1]
    tokens = 0  # Of that step; nothing is made of them here.
    save = event_log.SaveLogged(source.process, source.step, tokens)
    lines.insert(end, LoggedEvent(last.number, last.time_s, save))

  def _find_save(
    self, process: Process, source: event_log.Source
  ) -> tuple[Process, int] | None:
    """Returns where a process took its state from: a process and a line."""
    donor = _donor(process, source)
    indices = [
      i
      for i, line in enumerate(self._lines[donor])
      if isinstance(line.event, event_log.SaveLogged)
      and line.event.step == source.step
    ]
    # At τ = 0 fragments may be applied between a donation and a checkpoint of
    # one boundary: the checkpoint is the later one.
    return (donor, indices[-1]) if indices else None

  def _path(self, process: Process):
    return self._tapes.workdir.learner_tape(process[0])


def _donor(process: Process, source: event_log.Source) -> Process:
  own = source.kind in event_log.OF_ITS_OWN
  learner = process[0] if own else source.learner
  return learner, source.process


def _name(process: Process, snapshot: event_log.SnapshotLogged):
  """Returns the key that determines a snapshot's bytes.

  Its round is not part of it: the snapshot may be merged in a later one. Two
  with the same key have the same bytes, since taking in a fragment changes its
  base.
  """
  return (*process, snapshot.step, snapshot.fragment, snapshot.base_version)


def _applied(scripts: Mapping[Process, Script]) -> collections.Counter[Bytes]:
  uses = collections.Counter()
  for script in scripts.values():
    source = script.begin.source
    if source.kind in ('peer', 'peer_checkpoint'):
      uses.update(enumerate(source.crcs))
    uses.update(
      (line.event.fragment, line.event.crc)
      for line in script.lines
      if isinstance(line.event, event_log.ApplyLogged)
    )
  return uses


def _resumed(lines: tuple[LoggedEvent, ...]) -> frozenset[Named]:
  states = set()
  for line in lines:
    if isinstance(line.event, event_log.Started):
      states.update(states_of(line.event.versions, line.event.crcs))
      states.update(states_of(line.event.outer_versions, line.event.outer_crcs))
  return frozenset(states)


def states_of(versions, crcs) -> list[Named]:
  """Returns [(fragment, version, CRC), …]."""
  return [(p, v, crc) for p, (v, crc) in enumerate(zip(versions, crcs))]


# The replay of a plan.


class ReplayBackend:
  """Creates learners' states, and acts as the syncer.

  Args:
    programs: as of `LearnerKinds`.
  """

  def __init__(
    self, run_spec: RunSpec, programs: LearnerPrograms | None = None
  ):
    self._run_spec = run_spec
    self._kinds = LearnerKinds(run_spec, programs)
    # The syncer is a process without other devices.
    self._cpu = jax.local_devices(backend='cpu')[0]
    with jax.default_device(self._cpu):
      self.model = OuterState(run_spec)

  def from_seed(self, learner: int, machine: Machine) -> 'ReplayState':
    """Returns the state of a process that started from the seed alone."""
    run_spec, programs = self._of(machine)
    params, inner = programs.init(run_spec.initial_parameters())
    bases = dict(enumerate(run_spec.initial_fragments()))
    return _state(run_spec, programs, learner, params, inner, bases)

  def from_checkpoint(
    self, learner: int, machine: Machine, saved: 'ReplayState'
  ) -> 'ReplayState':
    """Returns the state of a process with all that another one had saved.

    The saved state is consumed.
    """
    run_spec, programs = self._of(machine)
    arrays = _placed((saved.params, saved.inner), programs)
    return _state(run_spec, programs, learner, *arrays, saved.own.bases)

  def from_peer(
    self,
    learner: int,
    machine: Machine,
    donor: 'ReplayState',
    thetas: Sequence[Arrays],
  ) -> 'ReplayState':
    """Returns the state of a process with a donor's inner state and Θ.

    The donor's state is consumed.
    """
    run_spec, programs = self._of(machine)
    # All of θ consists of fragments: its earlier values do not matter.
    params, inner = _placed((donor.params, donor.inner), programs)
    for p, theta in enumerate(thetas):
      params = programs.replace(p, params, programs.put_fragment(p, theta))
    bases = dict(enumerate(thetas))
    return _state(run_spec, programs, learner, params, inner, bases)

  def outer_step(
    self, merge: syncer_events.Merge, offered: Mapping[int, np.ndarray]
  ) -> OuterStep:
    """Makes a round's outer step from the `offered` bytes, by learner."""
    pieces = self._run_spec.layout.fragments[merge.fragment]
    taken = {
      learner: payload.decode(data, pieces, self._run_spec.up)
      for learner, data in offered.items()
    }
    weights = {share.learner: share.weight for share in merge.shares}
    with jax.default_device(self._cpu):
      return self.model.outer_step(merge.fragment, taken, weights)

  def _of(self, machine: Machine) -> tuple[RunSpec, LearnerPrograms]:
    """Returns what a learner on `machine` ran."""
    config = environment.config_like(self._run_spec.config, machine)
    return self._kinds.of(config)


def _placed(arrays, programs: LearnerPrograms):
  """Returns (θ, inner state) where a learner's programs have them."""
  likes = programs.params_like, programs.state_like
  return jax.tree.map(
    lambda x, like: jax.device_put(x, like.sharding), arrays, likes
  )


def _state(
  run_spec: RunSpec,
  programs: LearnerPrograms,
  learner: int,
  params,
  inner,
  bases,
) -> 'ReplayState':
  own = LocalDelta(programs, run_spec.config.protocol.blend, bases, params)
  return ReplayState(run_spec, programs, learner, params, inner, own)


@dataclasses.dataclass
class ReplayState:
  """The state of a learner's process."""

  run_spec: RunSpec
  programs: LearnerPrograms
  learner: int
  params: dict[str, jax.Array]  # Path -> parameter.
  inner: object  # State of the inner optimizer.
  own: LocalDelta

  def __post_init__(self):
    self._schedule = self.run_spec.schedule()
    self._dataset = self.run_spec.dataset(self.learner)

  def copy(self) -> 'ReplayState':
    """Returns a copy with arrays of its own, as a step donates its arrays."""
    return dataclasses.replace(
      self,
      params=jax.tree.map(jnp.copy, self.params),
      inner=jax.tree.map(jnp.copy, self.inner),
      own=self.own.copy(),
    )

  def step(self, rows: int, progress: int):
    """Makes one inner step on the batch that begins at row `rows`."""
    size = self.run_spec.config.data.batch
    batch = pipeline.batch_at(self._dataset, rows, size)
    lr = self._schedule(progress)
    self.params, self.inner, _ = self.programs.step(
      self.params,
      self.inner,
      self.programs.put_batch(batch),
      lr,
      (self.learner, rows),
    )

  def offer(self, snapshot: event_log.SnapshotLogged) -> np.ndarray:
    """Returns the bytes of θ_p at this boundary, against its base."""
    p, own = snapshot.fragment, self.own
    # Only merged snapshots are made, so all are needed.
    copy = own.snapshot(p, self.params, snapshot.handle, own.handles(p))
    pieces, up = self.run_spec.layout.fragments[p], self.run_spec.up
    return payload_parts.encode(own.reference(p), copy, pieces, up)

  def apply(self, event: event_log.ApplyLogged, theta: Arrays, training: bool):
    """Takes Θ_p into θ_p."""
    p = event.fragment
    placed = self.programs.put_fragment(p, theta)
    effect = learner_events.Apply(p, event.version, event.carry, event.handle)
    self.params = self.own.take_in(
      p, self.params, theta, placed, effect, training
    )


class ReplayedLearner:
  """Executes a script line by line, as far as it is asked to.

  The order is that of `learner/train_loop.py`: the step, then the lines of its
  boundary.

  Args:
    state: the state that the process starts from; consumed.
    theta: returns Θ_p by its name; each use counts.
  """

  def __init__(
    self,
    learner: int,
    script: Script,
    state: ReplayState,
    theta: Callable[[Named], Arrays],
  ):
    self._learner = learner
    self._script = script
    self._state: ReplayState | None = state
    self._theta = theta
    self._training = False
    self._rows = 0
    self._progress = 0  # Schedule argument of the next step.
    self._done = 0  # Number of executed lines.
    self._step = script.begin.step
    self._offers: dict[int, np.ndarray] = {}  # Bytes, by index of the line.
    self._saves: dict[int, list] = {}  # [copy, uses left], by index.

  @property
  def steps(self) -> int:
    """Inner steps so far."""
    return self._step - self._script.begin.step

  def take_offer(self, index: int) -> np.ndarray:
    """Returns the bytes of the snapshot at that line of the script."""
    self._advance(index)
    return self._offers.pop(index)

  def take_save(self, index: int) -> ReplayState:
    """Returns the state of the process at that line of the script."""
    self._advance(index)
    kept = self._saves[index]
    kept[1] -= 1
    if kept[1]:
      return kept[0].copy()
    return self._saves.pop(index)[0]

  def _advance(self, index: int):
    while self._done <= index:
      event = self._script.lines[self._done].event
      while self._step < event.step:
        self._inner_step()
      self._perform(self._done, event)
      self._done += 1
    if self._done == len(self._script.lines):
      self._state = None  # All that is needed of it has been copied.

  def _inner_step(self):
    if not self._training:
      raise NotReplayable(
        f'learner {self._learner}, process {self._script.begin.process}: its '
        f'step {self._step + 1} comes before its Begin'
      )
    self._state.step(self._rows, self._progress)
    self._step += 1
    self._rows += self._state.run_spec.config.data.batch
    self._progress += 1

  def _perform(self, index: int, event):
    match event:
      case event_log.BeginLogged():
        self._rows = event.rows
        self._training = True
      case event_log.Progress():
        self._progress = event.progress
      case event_log.SnapshotLogged():
        if index in self._script.offered:
          self._offers[index] = self._state.offer(event)
      case event_log.ApplyLogged():
        theta = self._theta((event.fragment, event.version, event.crc))
        self._state.apply(event, theta, self._training)
      case event_log.SaveLogged():
        uses = self._script.saves.get(index, 0)
        if uses:
          self._saves[index] = [self._state.copy(), uses]
      case event_log.CeaseLogged() | event_log.LeaveLogged():
        pass
      case _:
        raise TypeError(f'Not of a learner: {event!r}.')


@dataclasses.dataclass(frozen=True)
class Difference:
  """The first point at which the replay differs from the run."""

  round: int  # 0: before the first.
  fragment: int
  version: int
  crc: int  # As in the event log.
  replayed_crc: int
  shares: tuple[syncer_events.Share, ...]

  def __str__(self) -> str:
    merged = '; '.join(
      f'learner {s.learner} (process {process_of(s.incarnation)}, step '
      f'{s.step}, base {s.base_version}, weight {s.weight:.4f})'
      for s in self.shares
    )
    return (
      f'round {self.round}, fragment {self.fragment}, version '
      f'{self.version}: the run has CRC {self.crc:08x}, the replay '
      f'{self.replayed_crc:08x}; merged: {merged or "nothing yet"}'
    )


@dataclasses.dataclass(frozen=True)
class Replayed:
  """The result of a replay."""

  rounds: int  # Closed, with the CRC in the event log.
  steps: int  # Inner steps of all processes.
  processes: int
  difference: Difference | None
  ended: bool  # The event log reaches the end of the run.
  parameters: dict[str, np.ndarray]  # Θ: path -> f32 array.


class Replay:
  """One replay of a run.

  Args:
    tell: called after each round with rounds and steps so far.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    plan: ReplayPlan,
    backend: ReplayBackend,
    tell: Callable[[int, int], None] = lambda rounds, steps: None,
  ):
    self._run_spec = run_spec
    self._plan = plan
    self._backend = backend
    self._tell = tell
    self._model = backend.model
    self._first = run_spec.initial_fragments()
    self._learners: dict[Process, ReplayedLearner] = {}
    self._starting: set[Process] = set()
    self._uses = collections.Counter(plan.applied)
    self._thetas: dict[Bytes, Arrays] = {}
    self._states: dict[Named, FragmentState] = {}
    self._resumed = {(p, crc) for p, _, crc in plan.resumed}
    self._bytes: dict[Bytes, Arrays] = {}  # Θ_p that a syncer resumes.
    self._pending: dict[int, tuple[syncer_events.Merge, OuterStep]] = {}
    self._rounds = 0
    for p, crc in enumerate(self._model.crcs()):
      self._keep((p, 0, crc), self._model.state(p))

  def run(self) -> Replayed:
    """Replays to the end of the event log, or to the first difference.

    Raises:
      NotReplayable: a line needs what no earlier line produced.
    """
    difference, ended = None, False
    for line in self._plan.syncer:
      match line.event:
        case syncer_events.Merge() if line.number in self._plan.merges:
          self._merge(line.number, line.event)
        case event_log.Publish():
          difference = self._close(line.event.fragment, line.event.crc)
        case event_log.Started():
          difference = self._start(line.event)
        case syncer_events.End():
          ended = True
      if difference is not None:
        break
    return Replayed(
      self._rounds,
      self._steps(),
      len(self._learners),
      difference,
      ended,
      self._model.parameters(),
    )

  def _steps(self) -> int:
    return sum(learner.steps for learner in self._learners.values())

  # The syncer ---------------------------------------------------------------

  def _merge(self, number: int, merge: syncer_events.Merge):
    offered = {
      share.learner: self._learner(process).take_offer(index)
      for share, (process, index) in zip(
        merge.shares, self._plan.merges[number]
      )
    }
    outcome = self._backend.outer_step(merge, offered)
    self._pending[merge.fragment] = merge, outcome

  def _close(self, fragment: int, crc: int) -> Difference | None:
    """Installs what was merged, if it has the CRC of the run."""
    merge, outcome = self._pending.pop(fragment)
    if outcome.crc != crc:
      return Difference(
        merge.round, fragment, merge.version, crc, outcome.crc, merge.shares
      )
    self._model.install(fragment, outcome)
    self._keep((fragment, merge.version, crc), outcome.state)
    self._rounds += 1
    self._tell(self._rounds, self._steps())
    return None

  def _start(self, started: event_log.Started) -> Difference | None:
    """Starts a process of the syncer, from scratch or from an earlier one."""
    if len(started.versions) != len(self._first):
      raise NotReplayable(
        f'{len(started.versions)} fragments on the tape, '
        f'{len(self._first)} by the configuration'
      )
    for p, version, crc in states_of(started.versions, started.crcs):
      if self._closed_unsaid(p, version, crc):
        if (difference := self._close(p, crc)) is not None:
          return difference
      elif version == 0 and (p, 0, crc) not in self._states:
        replayed = self._model.crcs()[p]
        return Difference(0, p, 0, crc, replayed, ())
    self._pending.clear()
    outer = states_of(started.outer_versions, started.outer_crcs)
    for name, outer_name in zip(
      states_of(started.versions, started.crcs), outer
    ):
      fragment, version, crc = name
      if outer_name not in self._states:
        raise NotReplayable(
          f'the syncer went on with the outer state of {_words(outer_name)}, '
          'which no round gave'
        )
      if (fragment, crc) not in self._bytes:
        raise NotReplayable(
          f'the syncer went on with {_words(name)}, which no round gave'
        )
      state = dataclasses.replace(
        self._states[outer_name],
        theta=self._bytes[fragment, crc],
        version=version,
      )
      self._model.restore(fragment, state)
      # From here on this is the run's only state of that name, and what a later
      # checkpoint holds.
      self._states[name] = state
    return None

  def _closed_unsaid(self, fragment: int, version: int, crc: int) -> bool:
    """Returns True if only a start shows that a pending merge has closed.

    It is False if the bytes were lost and the version got those of an older
    one.
    """
    pending = self._pending.get(fragment)
    if pending is None or pending[0].version != version:
      return False
    return pending[1].crc == crc or (fragment, crc) not in self._bytes

  def _keep(self, name: Named, state: FragmentState):
    """Keeps a state only if a line of the event logs will need it."""
    fragment, _, crc = name
    if name in self._plan.resumed:
      self._states[name] = state
    if (fragment, crc) in self._resumed:
      self._bytes[fragment, crc] = state.theta
    if self._uses[fragment, crc] > 0:
      self._thetas[fragment, crc] = state.theta

  # The learners -------------------------------------------------------------

  def _theta(self, name: Named) -> Arrays:
    fragment, _, crc = name
    content = fragment, crc
    if content not in self._thetas:
      raise NotReplayable(
        f'a learner took in {_words(name)} after round {self._rounds}, which '
        'no round had given'
      )
    self._uses[content] -= 1
    theta = self._thetas[content]
    if self._uses[content] == 0:
      del self._thetas[content]
    return theta

  def _learner(self, process: Process) -> ReplayedLearner:
    """Starts a learner's process if that has not been done."""
    if process not in self._learners:
      if process in self._starting:
        raise NotReplayable(f'process {process[1]} began with itself')
      self._starting.add(process)
      self._learners[process] = ReplayedLearner(
        process[0],
        self._plan.scripts[process],
        self._state(process),
        self._theta,
      )
    return self._learners[process]

  def _state(self, process: Process) -> ReplayState:
    """Returns the state that a process started from."""
    begin = self._plan.scripts[process].begin
    source, to = begin.source, (process[0], begin.machine)
    if source.kind == event_log.SEED.kind:
      return self._backend.from_seed(*to)
    donor, index = self._plan.sources[process]
    save = self._learner(donor).take_save(index)
    if source.kind in event_log.OF_ITS_OWN:
      return self._backend.from_checkpoint(*to, save)
    names = states_of(source.versions, source.crcs)
    thetas = [self._theta(name) for name in names]
    return self._backend.from_peer(*to, save, thetas)


def _words(name: Named) -> str:
  fragment, version, crc = name
  return f'fragment {fragment}, version {version}, CRC {crc:08x}'
