# SPDX-License-Identifier: Apache-2.0
"""Repeats a run in one process, from its tapes, and compares the bytes.

It follows the order of the syncer's tape. A merge needs its snapshots; for each
of them, the process is continued up to that snapshot, and so takes in the Θ_p
that it had by then, which earlier rounds produced.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from diloco.numerics.outer import FragmentState
from diloco.protocol import syncer_io
from diloco.protocol.incarnation import process_of
from diloco.runtime import tape_lines
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.global_model import Outcome
from diloco.runtime.replay_contents import Contents, Given, Standing
from diloco.runtime.replay_learner import ReplayedLearner
from diloco.runtime.replay_plan import (
  Bytes,
  Named,
  NotReplayable,
  Plan,
  Process,
  states_of,
)

Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array.


@dataclasses.dataclass(frozen=True)
class Difference:
  """The first point at which the replay differs from the run."""

  round: int  # 0: before the first.
  fragment: int
  version: int
  crc: int  # As on the tape.
  replayed_crc: int
  shares: tuple[syncer_io.Share, ...]

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
    plan: made from the run's tapes.
    contents: performs the work of its processes, on the run's kind of device.
    tell: called after each round with rounds and steps so far.
  """

  def __init__(
    self,
    blueprint: Blueprint,
    plan: Plan,
    contents: Contents,
    tell: Callable[[int, int], None] = lambda rounds, steps: None,
  ):
    self._blueprint = blueprint
    self._plan = plan
    self._contents = contents
    self._tell = tell
    self._model = contents.model
    self._first = blueprint.initial_fragments()
    self._learners: dict[Process, ReplayedLearner] = {}
    self._beginning: set[Process] = set()
    self._uses = collections.Counter(plan.applied)
    self._thetas: dict[Bytes, Arrays] = {}
    self._states: dict[Named, FragmentState] = {}
    self._resumed = {(p, crc) for p, _, crc in plan.resumed}
    self._bytes: dict[Bytes, Arrays] = {}  # Θ_p that a syncer resumes.
    self._pending: dict[int, tuple[syncer_io.Merge, Outcome]] = {}
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
        case syncer_io.Merge() if line.number in self._plan.merges:
          self._merge(line.number, line.said)
        case tape_lines.Publish():
          difference = self._close(line.said.fragment, line.said.crc)
        case tape_lines.Started():
          difference = self._start(line.said)
        case syncer_io.End():
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

  def _merge(self, number: int, merge: syncer_io.Merge):
    offered = {
      share.learner: self._learner(process).take_offer(index)
      for share, (process, index) in zip(
        merge.shares, self._plan.merges[number]
      )
    }
    outcome = self._contents.outer_step(merge, offered)
    self._pending[merge.fragment] = merge, outcome

  def _close(self, fragment: int, crc: int) -> Difference | None:
    """Installs what was merged, if it has the CRC of the run."""
    merge, outcome = self._pending.pop(fragment)
    if outcome.crc != crc:
      return Difference(
        merge.round, fragment, merge.version, crc, outcome.crc, merge.shares
      )
    self._contents.install(merge, outcome)
    self._keep((fragment, merge.version, crc), outcome.state)
    self._rounds += 1
    self._tell(self._rounds, self._steps())
    return None

  def _start(self, started: tape_lines.Started) -> Difference | None:
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
      if process in self._beginning:
        raise NotReplayable(f'process {process[1]} began with itself')
      self._beginning.add(process)
      self._learners[process] = ReplayedLearner(
        process[0],
        self._plan.scripts[process],
        self._standing(process),
        self._theta,
      )
    return self._learners[process]

  def _standing(self, process: Process) -> Standing:
    """Returns the state that a process started from."""
    source = self._plan.scripts[process].begin.source
    learner = process[0]
    if source.kind == tape_lines.SEED.kind:
      return self._contents.from_seed(learner)
    donor, index = self._plan.sources[process]
    save = self._learner(donor).take_save(index)
    if source.kind == 'checkpoint':
      return self._contents.from_checkpoint(learner, save)
    names = states_of(source.versions, source.crcs)
    given = [self._theta(name) for name in names]
    return self._contents.from_peer(learner, save, given)


def _words(name: Named) -> str:
  fragment, version, crc = name
  return f'fragment {fragment}, version {version}, CRC {crc:08x}'
