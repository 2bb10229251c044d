# SPDX-License-Identifier: Apache-2.0
"""Does a run again in one process, from its tapes, and compares the bytes.

In the order of the syncer's tape. A merge asks for its snapshots; each asks
its process to go on as far as that snapshot, and so for the Θ_p that the
process had taken in by then, which earlier rounds gave.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping

import jax
import numpy as np

from diloco.numerics import payload
from diloco.numerics.outer import FragmentState
from diloco.protocol import syncer_io
from diloco.runtime import tape_lines
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.device import Device
from diloco.runtime.global_model import GlobalModel, Outcome
from diloco.runtime.incarnation import process_of
from diloco.runtime.replay_learner import ReplayedLearner, Standing
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
  """Where the replay first leaves the run."""

  round: int  # 0: before the first.
  fragment: int
  version: int
  crc: int  # As the tape has it.
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
  """What came of it."""

  rounds: int  # Closed, with the CRC of the tape.
  steps: int  # Inner steps, of all processes.
  processes: int
  difference: Difference | None
  ended: bool  # The tape goes on to the end of the run.
  parameters: dict[str, np.ndarray]  # Θ: path -> f32 array.


class Replay:
  """One replay.

  Args:
    blueprint: of the run.
    plan: from its tapes.
    device: compiled; default: one for `blueprint`.
    tell: called after each round with rounds and steps so far.
  """

  def __init__(
    self,
    blueprint: Blueprint,
    plan: Plan,
    device: Device | None = None,
    tell: Callable[[int, int], None] = lambda rounds, steps: None,
  ):
    self._blueprint = blueprint
    self._plan = plan
    self._device = device or Device(blueprint)
    self._tell = tell
    # The syncer is a process without other devices.
    self._cpu = jax.local_devices(backend='cpu')[0]
    with jax.default_device(self._cpu):
      self._model = GlobalModel(blueprint)
    self._first = blueprint.initial_fragments()
    self._learners: dict[Process, ReplayedLearner] = {}
    self._beginning: set[Process] = set()
    self._uses = collections.Counter(plan.applied)
    self._thetas: dict[Bytes, Arrays] = {}
    self._states: dict[Named, FragmentState] = {}
    self._resumed = {(p, crc) for p, _, crc in plan.resumed}
    self._contents: dict[Bytes, Arrays] = {}  # Of Θ_p that a syncer resumes.
    self._pending: dict[int, tuple[syncer_io.Merge, Outcome]] = {}
    self._rounds = 0
    for p, crc in enumerate(self._model.crcs()):
      self._keep((p, 0, crc), self._model.state(p))

  def run(self) -> Replayed:
    """To the end of the tape, or the first difference.

    Raises:
      NotReplayable: a line asks for what no earlier line gave.
    """
    difference, ended = None, False
    try:
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
    finally:
      for learner in self._learners.values():
        learner.close()
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
    pieces = self._blueprint.layout.fragments[merge.fragment]
    taken = {}
    for share, (process, index) in zip(merge.shares, self._plan.merges[number]):
      data = self._learner(process).take_offer(index)
      taken[share.learner] = payload.decode(data, pieces, self._blueprint.up)
    weights = {share.learner: share.weight for share in merge.shares}
    with jax.default_device(self._cpu):
      outcome = self._model.outer_step(merge.fragment, taken, weights)
    self._pending[merge.fragment] = merge, outcome

  def _close(self, fragment: int, crc: int) -> Difference | None:
    """Installs what was merged, if it has the CRC that the run had."""
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

  def _start(self, started: tape_lines.Started) -> Difference | None:
    """A process of the syncer begins, or goes on where another was."""
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
      if (fragment, crc) not in self._contents:
        raise NotReplayable(
          f'the syncer went on with {_words(name)}, which no round gave'
        )
      state = dataclasses.replace(
        self._states[outer_name],
        theta=self._contents[fragment, crc],
        version=version,
      )
      self._model.restore(fragment, state)
      # From here on the run has no other of that name: this is what a later
      # checkpoint holds.
      self._states[name] = state
    return None

  def _closed_unsaid(self, fragment: int, version: int, crc: int) -> bool:
    """Whether a start is all that says that a pending merge has closed.

    Not where its bytes were lost, and the version has got those of an older.
    """
    pending = self._pending.get(fragment)
    if pending is None or pending[0].version != version:
      return False
    return pending[1].crc == crc or (fragment, crc) not in self._contents

  def _keep(self, name: Named, state: FragmentState):
    """Only what a line of the tapes will ask for."""
    fragment, _, crc = name
    if name in self._plan.resumed:
      self._states[name] = state
    if (fragment, crc) in self._resumed:
      self._contents[fragment, crc] = state.theta
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
    if self._uses[content] == 0:
      return self._thetas.pop(content)
    return self._thetas[content]

  def _learner(self, process: Process) -> ReplayedLearner:
    """Begins it where that has not been done."""
    if process not in self._learners:
      if process in self._beginning:
        raise NotReplayable(f'process {process[1]} began with itself')
      self._beginning.add(process)
      self._learners[process] = ReplayedLearner(
        self._blueprint,
        self._device,
        process[0],
        self._plan.scripts[process],
        self._standing(process),
        self._theta,
      )
    return self._learners[process]

  def _standing(self, process: Process) -> Standing:
    """What a process had when it began."""
    source = self._plan.scripts[process].begin.source
    if source.kind == tape_lines.SEED.kind:
      params, inner = self._device.init(self._blueprint.initial_parameters())
      return Standing(params, inner, dict(enumerate(self._first)), {})
    donor, index = self._plan.sources[process]
    save = self._learner(donor).take_save(index)
    if source.kind == 'checkpoint':
      return save
    # θ is wholly made of fragments: what it is before matters not.
    params, bases = save.params, {}
    for name in states_of(source.versions, source.crcs):
      bases[name[0]] = self._theta(name)
      placed = self._device.put_fragment(name[0], bases[name[0]])
      params = self._device.overwrite(name[0], params, placed)
    return Standing(params, save.inner, bases, {})


def _words(name: Named) -> str:
  fragment, version, crc = name
  return f'fragment {fragment}, version {version}, CRC {crc:08x}'
