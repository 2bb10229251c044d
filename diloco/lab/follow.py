# SPDX-License-Identifier: Apache-2.0
"""Replays a real run in the lab and compares: python -m diloco.lab.follow …

  python -m diloco.lab.follow RUN              # from its tapes
  python -m diloco.lab.follow RUN --notapes    # by itself

The first command drives the lab's processes by the run's tapes. The second
makes a run of the same configuration by the lab's own machines and clock: with
τ = 0 and K = M only the configuration decides, as long as no process dies.

Exit code 0: the same bytes. 1: something differs; says what. 78: the run can't
be replayed; says why.
"""

import os
import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from absl import flags

from diloco.config import flags as config_flags
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.lab.outputs import Bar
from diloco.lab.packing import Donated
from diloco.lab.process_arrays import ArrayBackend, LearnerArrays
from diloco.lab.run import train
from diloco.learner.device import Device
from diloco.learner.replica import FragmentReplica
from diloco.metrics.workdir import Workdir
from diloco.numerics import payload
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner.bootstrap import Start
from diloco.protocol.syncer import events as syncer_events
from diloco.replay import replay_session
from diloco.replay.replay_backends import Given
from diloco.replay.replay_plan import NotReplayable
from diloco.run import logs, tape_events
from diloco.run.spec import RunSpec
from diloco.simulator.contents import RefusedContribution
from diloco.syncer.outer_state import OuterStep

_TAPES = flags.DEFINE_bool('tapes', True, 'Follow its tapes.')


# The contents of the lab's processes, driven by the tapes of a real run.
#
# The lab's own arrays do what the run's processes did, in the same order: that
# the result has the same bytes shows that the lab computes what a real run
# does.


class LabReplayBackend:
  """An implementation of `diloco.replay.replay_backends.ReplayBackend`."""

  def __init__(self, run_spec: RunSpec, device: Device):
    self._run_spec = run_spec
    self._lab = ArrayBackend(run_spec, device)
    self._cpu = jax.local_devices(backend='cpu')[0]
    with jax.default_device(self._cpu):
      self._syncer = self._lab.syncer(self._lab.first_crcs, None)
    self.model = self._syncer.model

  def from_seed(self, learner: int) -> 'LabReplayState':
    start = Start.from_seed(self._lab.first_crcs)
    arrays = self._lab.learner(learner, start, None)
    return LabReplayState(self._run_spec, self._lab, learner, arrays)

  def from_checkpoint(
    self, learner: int, saved: 'LabReplayState'
  ) -> 'LabReplayState':
    return saved

  def from_peer(
    self, learner: int, donor: 'LabReplayState', given: Sequence[Given]
  ) -> 'LabReplayState':
    """Adopts a peer's state as a real run does: Θ and inner state, then θ."""
    state = self.from_seed(learner)
    state.adopt(donor.arrays, given)
    return state

  def outer_step(
    self, merge: syncer_events.Merge, offered: Mapping[int, np.ndarray]
  ) -> OuterStep:
    try:
      taken = {
        learner: self._syncer.decode(merge.fragment, data)[0]
        for learner, data in offered.items()
      }
    except RefusedContribution as error:
      raise NotReplayable(f'round {merge.round}: {error}') from None
    with jax.default_device(self._cpu):
      self._syncer.merge(merge, taken)
    return self._syncer.merged(merge.fragment)

  def install(self, merge: syncer_events.Merge, outcome: OuterStep):
    self._syncer.publish(merge.fragment, merge.version)


class LabReplayState:
  """An implementation of `diloco.replay.replay_backends.ReplayState`.

  Args:
    arrays: consumed.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    lab: ArrayBackend,
    learner: int,
    arrays: LearnerArrays,
  ):
    self.arrays = arrays
    self._run_spec = run_spec
    self._lab = lab
    self._learner = learner

  def copy(self) -> 'LabReplayState':
    saved, crcs = self.arrays.save(), tuple(self.arrays.base_crcs)
    # `apply` decides to which versions they belong.
    start = Start.from_seed(crcs)
    arrays = self._lab.learner(self._learner, start, saved)
    return LabReplayState(self._run_spec, self._lab, self._learner, arrays)

  def step(self, position: int, progress: int):
    self.arrays.step(position, progress)

  def snapshot(self, said: tape_events.Snapshot):
    effect = learner_events.Snapshot(
      **said.terms(),
      handle=said.handle,
      keep=self.arrays.kept(said.fragment),
    )
    return self.arrays.snapshot(effect)

  def offer(self, said: tape_events.Snapshot, copied) -> np.ndarray:
    return self.arrays.offer(said, copied)

  def apply(self, said: tape_events.Apply, given: Given, training: bool):
    p = said.fragment
    pieces = self._run_spec.layout.fragments[p]
    data = payload.encode(given.theta, pieces, self._run_spec.full)
    reason = self.arrays.replace(p, given.version, data, given.crc)
    if reason is not None:
      raise NotReplayable(f'learner {self._learner}: {reason}')
    effect = learner_events.Apply(p, said.version, said.carry, said.handle)
    self.arrays.apply(effect, training)

  def adopt(self, donor: LearnerArrays, given: Sequence[Given]):
    """Adopts a donor's inner state, and the given Θ."""
    held = [
      FragmentReplica(each.version, each.theta, each.crc) for each in given
    ]
    self.arrays.adopt(None, Donated(held, donor.donate().inner))
    self.arrays.adopt_inner()
    for p, each in enumerate(given):
      effect = learner_events.Apply(p, each.version, carry=False)
      self.arrays.apply(effect, training=False)


def main(argv) -> int:
  """Replays the run, compares the result and prints the outcome."""
  logs.keep_ours()
  workdir = Workdir(pathlib.Path(argv[1]))
  with config_flags.refusing(*replay_session.UNREADABLE):
    run = replay_session.open_run(workdir)
    if not _TAPES.value:
      return _by_itself(run)
    backend = LabReplayBackend(run.run_spec, Device(run.run_spec))
    return replay_session.make_again(run, backend)


def _by_itself(run: replay_session.Recorded) -> int:
  _check_decided(run.run_spec.config)
  protocol = run.run_spec.config.protocol
  bar = Bar(protocol.learners, protocol.total_steps)
  try:
    trained = train(run.run_spec, observer=bar)
  finally:
    bar.close()
  print(f'{trained.rounds} rounds, {trained.steps} inner steps in the lab')
  return replay_session.compare_parameters(trained.parameters, run.workdir)


def _check_decided(config: RunConfig):
  """Rejects runs whose merges depend on clocks."""
  protocol = config.protocol
  if protocol.overlap_steps or protocol.quorum != protocol.learners:
    raise ConfigError(
      [
        f'--notapes: protocol.overlap_steps={protocol.overlap_steps}, '
        f'quorum={protocol.quorum}, learners={protocol.learners}: the run '
        'depends on its clocks unless overlap_steps=0 and quorum=learners; '
        'follow its tapes'
      ]
    )


if __name__ == '__main__':
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  config_flags.run_of_runs(main)
