# SPDX-License-Identifier: Apache-2.0
"""Restores what a learner's process starts from: a checkpoint, or its seed."""

import dataclasses
from collections.abc import Iterable

from absl import logging

from diloco.checkpoint.learner_records import LearnerProgress, LearnerRecords
from diloco.learner.device import Device, Params
from diloco.learner.replica import FragmentReplica, SlicedReplica, WholeReplica
from diloco.metrics.writer import Writer
from diloco.numerics import payload
from diloco.protocol.learner.bootstrap import Start
from diloco.protocol.learner.state import LearnerState
from diloco.run.event_log import LearnerEventLog
from diloco.run.host_slices import SliceMap
from diloco.run.spec import RunSpec
from diloco.run.tape_events import SEED, Source

NONE = -1  # No checkpoint.


# Restores what one host starts from, if the learner has several.
#
# All hosts restore the newest step of which each has a complete checkpoint;
# without one, all start from the seed.


@dataclasses.dataclass(frozen=True)
class RestoredHostState:
  """One host's state at the first boundary.

  Attributes:
    params: θ, on the devices.
    inner_state: state of the inner optimizer, on the devices.
    copy: this host's part of Θ, which holds the bases of θ.
    progress: the learner's progress; None: it starts from its seed.
  """

  params: Params
  inner_state: object
  copy: SlicedReplica
  progress: LearnerProgress | None


class CheckpointGone(Exception):
  """A checkpoint that this host reported cannot be read; the learner
  restarts.
  """


def common_step(by_host: Iterable[Iterable[int]]) -> int:
  """Returns the newest step that all hosts have; `NONE` if there is none."""
  return max(set.intersection(*map(set, by_host)), default=NONE)


def restore_host(
  run_spec: RunSpec, device: Device, records: LearnerRecords, step: int
) -> RestoredHostState:
  """Restores this host's part of the checkpoint of `step`, or of the seed.

  Raises:
    BrokenRecord: the folder belongs to another learner or run.
    CheckpointGone: the checkpoint can't be read.
  """
  holding = device.holding
  slice_map = SliceMap(run_spec.owners, device.partition)
  # Computed whole once, so that each host knows the initial CRCs by itself.
  initial = run_spec.initial_parameters()
  whole = run_spec.fragments_of(initial)
  bases = {p: holding.needed_of(p, theta) for p, theta in enumerate(whole)}
  if step == NONE:
    layout = run_spec.layout.fragments
    held = [
      FragmentReplica(0, bases[p], payload.crc(theta, layout[p]))
      for p, theta in enumerate(whole)
    ]
    params, state = device.init(initial)
    copy = SlicedReplica(run_spec, slice_map, holding.host, held)
    return RestoredHostState(params, state, copy, None)
  found = records.restore(device.params_like, device.state_like, bases, step)
  if found is None:
    raise CheckpointGone(f'the checkpoint of step {step} can not be read')
  progress = found.progress
  logging.info('goes on from %s', found.path)
  held = [
    FragmentReplica(version, found.bases[p], crc)
    for p, (version, crc) in enumerate(zip(progress.versions, progress.crcs))
  ]
  copy = SlicedReplica(run_spec, slice_map, holding.host, held)
  return RestoredHostState(found.params, found.inner_state, copy, progress)


@dataclasses.dataclass(frozen=True)
class RestoredState:
  """A process's state at the first boundary.

  Attributes:
    params: θ, on the devices.
    inner_state: state of the inner optimizer, on the devices.
    host: the host's copy of Θ, which holds the bases of θ.
    start: what the machine knows of this state.
    source: origin of the state, for the event tape.
  """

  params: Params
  inner_state: object
  host: WholeReplica | SlicedReplica
  start: Start
  source: Source


def restore(
  run_spec: RunSpec, device: Device, records: LearnerRecords
) -> RestoredState:
  """Restores the newest complete checkpoint; if there is none, the seed's
  state.

  Raises:
    BrokenRecord: the folder belongs to another learner or run.
  """
  bases_like = dict(enumerate(run_spec.fragments_like()))
  found = records.restore(device.params_like, device.state_like, bases_like)
  if found is None:
    # Drawn once: the bases are views of what the devices are given.
    initial = run_spec.initial_parameters()
    params, state = device.init(initial)
    host = WholeReplica(run_spec, run_spec.fragments_of(initial))
    start = Start.from_seed(host.crcs())
    return RestoredState(params, state, host, start, SEED)
  progress = found.progress
  logging.info('goes on from %s', found.path)
  bases = [found.bases[p] for p in bases_like]
  host = WholeReplica(run_spec, bases, progress.versions)
  source = Source(
    'checkpoint', records.learner, progress.process, progress.step
  )
  return RestoredState(
    found.params, found.inner_state, host, _start(progress, host), source
  )


def _start(
  progress: LearnerProgress, host: WholeReplica | SlicedReplica
) -> Start:
  return Start(
    source=f'its checkpoint of step {progress.step}',
    crcs=host.crcs(),
    versions=progress.versions,
    from_steps=progress.from_steps,
    from_tokens=progress.from_tokens,
    step=progress.step,
    tokens=progress.tokens,
    position=progress.position,
    closed_round=progress.closed_known,
    global_step=progress.global_step,
  )


def restore_leading(
  run_spec: RunSpec, device: Device, records: LearnerRecords, step: int
) -> RestoredState:
  """Restores the leading host's part, and the learner's `Start`.

  Args:
    step: step of the checkpoint that all hosts restore; `part_beginning.NONE`
      for the seed.

  Raises:
    BrokenRecord: the folder belongs to another learner or run.
    CheckpointGone: the checkpoint cannot be read.
  """
  part = restore_host(run_spec, device, records, step)
  progress, copy = part.progress, part.copy
  if progress is None:
    start, source = Start.from_seed(copy.crcs()), SEED
  else:
    start = _start(progress, copy)
    source = Source(
      'checkpoint', records.learner, progress.process, progress.step
    )
  return RestoredState(part.params, part.inner_state, copy, start, source)


def progress_of(
  state: LearnerState, position: int, process: int, crcs: tuple[int, ...]
) -> LearnerProgress:
  """Returns the progress record of a checkpoint at a boundary.

  Args:
    state: the machine's state at that boundary.
    position: index of the next batch.
    process: this process's number; see `protocol.incarnation`.
    crcs: CRC of each fragment's base.
  """
  return LearnerProgress(
    process=process,
    position=position,
    step=state.step,
    tokens=state.tokens,
    versions=tuple(f.base for f in state.fragments),
    crcs=crcs,
    from_steps=tuple(f.from_step for f in state.fragments),
    from_tokens=tuple(f.from_tokens for f in state.fragments),
    closed_known=state.closed_known,
    global_step=state.global_step,
  )


@dataclasses.dataclass(frozen=True)
class Outputs:
  """The outputs of one process."""

  checkpoints: LearnerRecords
  metrics: Writer
  tape: LearnerEventLog
