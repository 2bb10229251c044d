# SPDX-License-Identifier: Apache-2.0
"""Restores what a learner's process starts from: a checkpoint, or the seed."""

import dataclasses

from absl import logging

from diloco.checkpoint.learner_records import LearnerProgress, LearnerRecords
from diloco.protocol.joining import Start
from diloco.protocol.learner_state import State
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.device import Device, Params
from diloco.runtime.host_copy import HostCopy
from diloco.runtime.part_beginning import begin_part
from diloco.runtime.part_copy import PartCopy
from diloco.runtime.tape_lines import SEED, Source


@dataclasses.dataclass(frozen=True)
class Beginning:
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
  host: HostCopy | PartCopy
  start: Start
  source: Source


def begin(
  blueprint: Blueprint, device: Device, records: LearnerRecords
) -> Beginning:
  """Restores the newest complete checkpoint; if there is none, the seed's
  state.

  Raises:
    BrokenRecord: the folder belongs to another learner or run.
  """
  fragments = blueprint.initial_fragments()
  bases_like = dict(enumerate(fragments))
  found = records.restore(device.params_like, device.state_like, bases_like)
  if found is None:
    params, state = device.init(blueprint.initial_parameters())
    host = HostCopy(blueprint, fragments)
    start = Start.from_seed(host.crcs())
    return Beginning(params, state, host, start, SEED)
  progress = found.progress
  logging.info('goes on from %s', found.path)
  bases = [found.bases[p] for p in range(len(fragments))]
  host = HostCopy(blueprint, bases, progress.versions)
  source = Source(
    'checkpoint', records.learner, progress.process, progress.step
  )
  return Beginning(
    found.params, found.inner_state, host, _start(progress, host), source
  )


def _start(progress: LearnerProgress, host: HostCopy | PartCopy) -> Start:
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


def begin_leading(
  blueprint: Blueprint, device: Device, records: LearnerRecords, step: int
) -> Beginning:
  """Restores the leading host's part, and the learner's `Start`.

  Args:
    step: step of the checkpoint that all hosts restore; `part_beginning.NONE`
      for the seed.

  Raises:
    BrokenRecord: the folder belongs to another learner or run.
    CheckpointGone: the checkpoint cannot be read.
  """
  part = begin_part(blueprint, device, records, step)
  progress, copy = part.progress, part.copy
  if progress is None:
    start, source = Start.from_seed(copy.crcs()), SEED
  else:
    start = _start(progress, copy)
    source = Source(
      'checkpoint', records.learner, progress.process, progress.step
    )
  return Beginning(part.params, part.inner_state, copy, start, source)


def progress_of(
  state: State, position: int, process: int, crcs: tuple[int, ...]
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
