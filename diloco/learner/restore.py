# SPDX-License-Identifier: Apache-2.0
"""Restores what a learner's process starts from: a checkpoint, or nothing."""

import dataclasses
import json
from collections.abc import Mapping

import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from diloco.checkpoint.arrays import BrokenRecord
from diloco.checkpoint.learner_records import LearnerRecords
from diloco.learner.exchange_programs import (
  ExchangePrograms,
  Params,
  take_boxes,
)
from diloco.learner.hosts.boundary_memory import BoundaryMemory, StoredBoundary
from diloco.learner.replica import FragmentReplica, Replica
from diloco.numerics import native, payload
from diloco.protocol import host_messages
from diloco.protocol.learner.bootstrap import Start
from diloco.protocol.learner.state import LearnerState
from diloco.run.event_log import SEED, Source
from diloco.run.payload_parts import SliceMap
from diloco.run.spec import RunSpec

NONE = -1  # No checkpoint.
HELD_IN = {'checkpoint': 'its checkpoint', 'slice': "its slices' memory"}


@dataclasses.dataclass(frozen=True)
class RestoredState:
  """A process's state at the first boundary.

  Attributes:
    params: θ, on the devices; zeros if there is no checkpoint.
    inner_state: state of the inner optimizer, on the devices; None if there is
      no checkpoint: until a peer's is adopted, a fresh one made, or Θ drawn.
    host: the host's copy of Θ, which holds the bases of θ.
    start: what the machine knows of this state.
    source: origin of the state, for the event log.
    progress: of a boundary in the memory of slices, JSON; '' of another state.
  """

  params: Params
  inner_state: object
  host: Replica
  start: Start
  source: Source
  progress: str = ''


class CheckpointGone(Exception):
  """A checkpoint that this host reported is broken; the learner restarts."""


def started_with(
  host: int, records: LearnerRecords, memory: BoundaryMemory | None
) -> tuple[host_messages.HostStarted, StoredBoundary | None]:
  """Returns what a host can restore, and the boundary that it has in memory."""
  stored = None
  if memory is not None:
    try:
      stored = memory.read()
    except BrokenRecord as error:
      logging.warning('%s', error)
  steps = records.readable()
  if stored is None:
    return host_messages.HostStarted(host, steps), None
  held = stored.step, stored.progress
  return host_messages.HostStarted(host, steps, *held), stored


def restore(
  run_spec: RunSpec,
  programs: ExchangePrograms,
  records: LearnerRecords,
  source: host_messages.RestoreFrom | None = None,
  stored: StoredBoundary | None = None,
) -> RestoredState:
  """Restores this host's part of a checkpoint.

  Without one the process holds nothing: whether the run has a state to give it,
  or it draws the initial one, is known only from the syncer.

  Args:
    source: what all hosts restore; None: the newest complete checkpoint, as a
      learner's only host may.
    stored: the boundary that this host has in memory.

  Raises:
    BrokenRecord: the folder belongs to another learner or run.
    CheckpointGone: the checkpoint of `step` can't be read.
  """
  slices = programs.holding
  slice_map = SliceMap(run_spec.owners, programs.partition)

  def found(kind: str, progress: Mapping, params, state, bases):
    held = [
      FragmentReplica(*fields)
      for fields in zip(progress['versions'], bases, progress['crcs'])
    ]
    host = Replica(run_spec, held, slice_map, programs.holding.host)
    at = Source(kind, records.learner, progress['process'], progress['step'])
    kept = source.progress if kind == 'slice' else ''
    start = _start(progress, kind)
    return RestoredState(params, state, host, start, at, kept)

  saved = None
  step = None if source is None else source.step
  if source is not None:
    records.set_aside_after(step)
  if source is not None and source.slice >= 0:
    progress = json.loads(source.progress)
    gives = None if source.everywhere else source.slice
    params, state, bases = programs.restored(stored, gives)
    logging.info('goes on from memory, step %d', step)
    return found('slice', progress, params, state, bases)
  if step != NONE:
    saved = records.restore_state(
      programs.params_like,
      programs.state_like,
      dict(enumerate(programs.bases_like())),
      step,
    )
  if saved is None and step not in (None, NONE):
    raise CheckpointGone(f'the checkpoint of step {step} can not be read')
  if saved is None:
    host = Replica.empty(run_spec, slice_map, slices.host)
    params = programs.zeros(programs.params_like)
    start = Start.empty(len(run_spec.layout.fragments))
    return RestoredState(params, None, host, start, SEED)
  progress, arrays = saved.meta['progress'], saved.arrays
  logging.info('goes on from %s', saved.path)
  bases = programs.restored_bases(arrays['bases'])
  return found(
    'checkpoint', progress, arrays['params'], arrays['optimizer'], bases
  )


def initial_replicas(
  run_spec: RunSpec, programs: ExchangePrograms, params: Params
) -> list[FragmentReplica]:
  """Returns what this host needs of Θ at version 0, of which `params` are.

  The hosts of a learner gather one piece at a time, for the CRC of the whole.
  """
  replicas = []
  for p, pieces in enumerate(run_spec.layout.fragments):
    arrays = programs.snapshot(p, params)
    theta = take_boxes(programs.holding.needed[p], arrays)
    wholes = (
      theta.get(piece.name)
      if programs.partition.host_count == 1
      else multihost_utils.process_allgather(arrays[piece.name], tiled=True)
      for piece in pieces
    )
    crcs = [native.crc32(np.ascontiguousarray(whole)) for whole in wholes]
    replicas.append(FragmentReplica(0, theta, payload.crc_of(crcs)))
  return replicas


def _start(progress: Mapping, kind: str) -> Start:
  """Returns what the machine knows from what `progress_of` made."""
  by_fragment = ('crcs', 'versions', 'from_steps', 'from_tokens')
  numbers = ('step', 'tokens', 'rows', 'global_step')
  return Start(
    source=f'{HELD_IN[kind]} of step {progress["step"]}',
    closed_round=progress['closed_known'],
    **{key: tuple(progress[key]) for key in by_fragment},
    **{key: progress[key] for key in numbers},
  )


def progress_of(
  state: LearnerState, rows: int, process: int, crcs: tuple[int, ...]
) -> dict:
  """Returns the progress record of a checkpoint at a boundary, plain JSON.

  Args:
    state: the machine's state at that boundary.
    rows: taken of its data shard.
    process: this process's number; see `protocol.incarnation`.
    crcs: CRC of each fragment's base.
  """
  return {
    'process': process,
    'rows': rows,
    'step': state.step,
    'tokens': state.tokens,
    'versions': [f.base for f in state.fragments],
    'crcs': list(crcs),
    # Own step and tokens when each base was received.
    'from_steps': [f.from_step for f in state.fragments],
    'from_tokens': [f.from_tokens for f in state.fragments],
    'closed_known': state.closed_known,
    'global_step': state.global_step,
  }
