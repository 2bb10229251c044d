# SPDX-License-Identifier: Apache-2.0
"""Repeats a run in one process, from its tapes, and compares the bytes.

It follows the order of the syncer's tape. A merge needs its snapshots; for each
of them, the process is continued up to that snapshot, and so takes in the Θ_p
that it had by then, which earlier rounds produced.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from diloco.learner.device import Device
from diloco.learner.own_progress import OwnProgress
from diloco.numerics import payload
from diloco.numerics.outer import FragmentState
from diloco.protocol.incarnation import process_of
from diloco.protocol.learner import events as learner_events
from diloco.protocol.syncer import events as syncer_events
from diloco.replay.replay_plan import (
  Bytes,
  Named,
  NotReplayable,
  Process,
  ReplayPlan,
  Script,
  states_of,
)
from diloco.run import payload_parts, tape_events
from diloco.run.spec import RunSpec
from diloco.syncer.outer_state import OuterState, OuterStep

Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array.


@dataclasses.dataclass(frozen=True)
class Given:
  """Θ_p as a learner takes it in."""

  version: int
  crc: int  # CRC of its bytes.
  theta: Arrays


class ReplayBackend:
  """Creates learners' states, and acts as the syncer, on one device."""

  def __init__(self, run_spec: RunSpec, device: Device):
    self._run_spec = run_spec
    self._device = device
    # The syncer is a process without other devices.
    self._cpu = jax.local_devices(backend='cpu')[0]
    with jax.default_device(self._cpu):
      self.model = OuterState(run_spec)

  def from_seed(self, learner: int) -> 'ReplayState':
    """Returns the state of a process that started from the configuration
    alone.
    """
    params, inner = self._device.init(self._run_spec.initial_parameters())
    bases = dict(enumerate(self._run_spec.initial_fragments()))
    return self._state(learner, params, inner, bases)

  def from_peer(
    self, learner: int, donor: 'ReplayState', given: Sequence[Given]
  ) -> 'ReplayState':
    """Returns the state of a process with a donor's inner state and Θ.

    The donor's state is consumed.
    """
    # All of θ consists of fragments: its earlier values do not matter.
    params = donor.params
    for p, each in enumerate(given):
      placed = self._device.put_fragment(p, each.theta)
      params = self._device.overwrite(p, params, placed)
    bases = {p: each.theta for p, each in enumerate(given)}
    return self._state(learner, params, donor.inner, bases)

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

  def _state(self, learner: int, params, inner, bases) -> 'ReplayState':
    blend = self._run_spec.config.protocol.blend
    own = OwnProgress(self._device, blend, bases, params)
    return ReplayState(
      self._run_spec, self._device, learner, params, inner, own
    )


@dataclasses.dataclass
class ReplayState:
  """The state of a learner's process."""

  run_spec: RunSpec
  device: Device
  learner: int
  params: dict[str, jax.Array]  # Path -> parameter.
  inner: object  # State of the inner optimizer.
  own: OwnProgress

  def __post_init__(self):
    self._schedule = self.run_spec.schedule()
    self._dataset = self.run_spec.dataset(self.learner)

  def copy(self) -> 'ReplayState':
    """Returns a copy with arrays of its own, since a step donates its
    arrays.
    """
    return dataclasses.replace(
      self,
      params=jax.tree.map(jnp.copy, self.params),
      inner=jax.tree.map(jnp.copy, self.inner),
      own=self.own.copy(),
    )

  def step(self, position: int, progress: int):
    """Makes one inner step on the batch at `position`."""
    batch = self.device.put_batch(self._dataset[position])
    lr = self._schedule(progress)
    self.params, self.inner, _ = self.device.step(
      self.params, self.inner, batch, lr, (self.learner, position)
    )

  def snapshot(self, said: tape_events.Snapshot) -> dict[str, jax.Array]:
    """Returns a copy of θ_p at this boundary."""
    p = said.fragment
    # Only merged snapshots are made, so all are needed.
    return self.own.snapshot(p, self.params, said.handle, self.own.handles(p))

  def offer(self, said: tape_events.Snapshot, copy) -> np.ndarray:
    """Returns the bytes of that snapshot against its base."""
    p = said.fragment
    pieces = self.run_spec.layout.fragments[p]
    reference = self.own.reference(p)
    return payload_parts.encode(reference, copy, pieces, self.run_spec.up)

  def apply(self, said: tape_events.Apply, given: Given, training: bool):
    """Takes Θ_p into θ_p."""
    p = said.fragment
    placed = self.device.put_fragment(p, given.theta)
    effect = learner_events.Apply(p, said.version, said.carry, said.handle)
    self.params = self.own.take_in(
      p, self.params, given.theta, placed, effect, training
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
    theta: Callable[[Named], Given],
  ):
    self._learner = learner
    self._script = script
    self._state: ReplayState | None = state
    self._theta = theta
    self._training = False
    self._position = 0
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
      said = self._script.lines[self._done].said
      while self._step < said.step:
        self._inner_step()
      self._perform(self._done, said)
      self._done += 1
    if self._done == len(self._script.lines):
      self._state = None  # All that is needed of it has been copied.

  def _inner_step(self):
    if not self._training:
      raise NotReplayable(
        f'learner {self._learner}, process {self._script.begin.process}: its '
        f'step {self._step + 1} comes before its Begin'
      )
    self._state.step(self._position, self._progress)
    self._step += 1
    self._position += 1
    self._progress += 1

  def _perform(self, index: int, said):
    match said:
      case tape_events.Begin():
        self._position = said.position
        self._training = True
      case tape_events.Progress():
        self._progress = said.progress
      case tape_events.Snapshot():
        self._snapshot(index, said)
      case tape_events.Apply():
        self._apply(said)
      case tape_events.Save():
        uses = self._script.saves.get(index, 0)
        if uses:
          self._saves[index] = [self._state.copy(), uses]
      case tape_events.Cease() | tape_events.Leave():
        pass
      case _:
        raise TypeError(f'Not of a learner: {said!r}.')

  def _snapshot(self, index: int, said: tape_events.Snapshot):
    if index in self._script.offered:
      copy = self._state.snapshot(said)
      self._offers[index] = self._state.offer(said, copy)

  def _apply(self, said: tape_events.Apply):
    given = self._theta((said.fragment, said.version, said.crc))
    self._state.apply(said, given, self._training)


@dataclasses.dataclass(frozen=True)
class Difference:
  """The first point at which the replay differs from the run."""

  round: int  # 0: before the first.
  fragment: int
  version: int
  crc: int  # As on the tape.
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

  rounds: int  # Closed, with the CRC on the tape.
  steps: int  # Inner steps of all processes.
  processes: int
  difference: Difference | None
  ended: bool  # The tape reaches the end of the run.
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
    """Replays to the end of the tape, or to the first difference.

    Raises:
      NotReplayable: a line needs what no earlier line produced.
    """
    difference, ended = None, False
    for line in self._plan.syncer:
      match line.said:
        case syncer_events.Merge() if line.number in self._plan.merges:
          self._merge(line.number, line.said)
        case tape_events.Publish():
          difference = self._close(line.said.fragment, line.said.crc)
        case tape_events.Started():
          difference = self._start(line.said)
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

  def _start(self, started: tape_events.Started) -> Difference | None:
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
        found = self._model.crcs()[p]
        return Difference(0, p, 0, crc, found, ())
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
    """Keeps a state only if a line of the tapes will need it."""
    fragment, _, crc = name
    if name in self._plan.resumed:
      self._states[name] = state
    if (fragment, crc) in self._resumed:
      self._bytes[fragment, crc] = state.theta
    if self._uses[fragment, crc] > 0:
      self._thetas[fragment, crc] = state.theta

  # The learners -------------------------------------------------------------

  def _theta(self, name: Named) -> Given:
    fragment, version, crc = name
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
    return Given(version, crc, theta)

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
    source = self._plan.scripts[process].begin.source
    learner = process[0]
    if source.kind == tape_events.SEED.kind:
      return self._backend.from_seed(learner)
    donor, index = self._plan.sources[process]
    save = self._learner(donor).take_save(index)
    if source.kind == 'checkpoint':
      return save
    names = states_of(source.versions, source.crcs)
    given = [self._theta(name) for name in names]
    return self._backend.from_peer(learner, save, given)


def _words(name: Named) -> str:
  fragment, version, crc = name
  return f'fragment {fragment}, version {version}, CRC {crc:08x}'
