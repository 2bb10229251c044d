# SPDX-License-Identifier: Apache-2.0
"""A learner's checkpoints: θ, its moments, bases and progress."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from diloco.checkpoint import orbax_files
from diloco.checkpoint.arrays import BrokenRecord
from diloco.checkpoint.store import Checkpoints

# It may be larger than when a checkpoint was made: the run was extended.
TOTAL_STEPS = 'protocol.total_steps'
Bases = Mapping[int, Mapping[str, np.ndarray]]  # Fragment -> piece -> f32.


@dataclasses.dataclass(frozen=True)
class LearnerProgress:
  """The state of a learner besides its arrays."""

  process: int  # Process number; see `protocol.incarnation`.
  position: int  # The next batch of its data shard.
  step: int  # Inner steps that it has made.
  tokens: int  # Tokens that it has trained on.
  versions: tuple[int, ...]  # Version of each fragment's base.
  crcs: tuple[int, ...]  # CRCs of these bases.
  from_steps: tuple[int, ...]  # `step` when each base was received.
  from_tokens: tuple[int, ...]  # `tokens` when each base was received.
  closed_known: int  # The last round that it knew to be closed.
  global_step: int  # t, as far as it knew.


@dataclasses.dataclass(frozen=True)
class Restored:
  """A restored learner."""

  params: Any
  inner_state: Any
  bases: dict[int, dict[str, np.ndarray]]
  progress: LearnerProgress
  path: pathlib.Path


@dataclasses.dataclass(frozen=True)
class HeldState:
  """θ and the inner state of one boundary.

  Attributes:
    params: θ; None if only the inner state is held.
    inner_state: the inner optimizer's state.
    release: from its call on, which may come from any thread, the arrays may be
      overwritten; a second call does nothing. None: they may be as soon as
      the method that is given them has returned.
  """

  params: Any
  inner_state: Any
  release: Callable[[], None] | None = None


class LearnerRecords:
  """Reads and writes one folder, for one thread.

  Args:
    folder: used by this learner alone.
    fingerprints: of the run; checkpoints with others are refused.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    learner: int,
    fingerprints: Mapping[str, str],
    keep_latest: int,
    keep_best: int,
    say: Callable[[str], None],
    files: orbax_files.Files = orbax_files.SOLE,
  ):
    self.learner = learner
    self._folder = folder
    self._identity = {**fingerprints, 'learner': str(learner)}
    self._checkpoints = Checkpoints(folder, keep_latest, keep_best, say, files)

  @property
  def failed(self) -> int:
    """Number of saves that were begun and failed."""
    return self._checkpoints.failed

  @property
  def saving(self) -> bool:
    """True while a save is in progress."""
    return self._checkpoints.saving

  @property
  def newest_step(self) -> int | None:
    """Step of the newest checkpoint, complete as far as is known."""
    return self._checkpoints.newest_step

  def can_begin(self, step: int) -> bool:
    """Returns False, with a log line, if `save` would not begin."""
    return self._checkpoints.can_begin(step)

  def save(
    self,
    step: int,
    held: HeldState,
    bases: Bases,
    progress: LearnerProgress,
    loss: float | None,
  ) -> bool:
    """Starts to save; see `Checkpoints.save`.

    Args:
      step: inner steps made; newer than all that was saved.
      held: θ and the inner state after that step; released.
      bases: Θ_p as last received, by fragment; never written to.
      progress: the progress at that step.
      loss: loss of θ, for `keep_best`.
    """
    meta = {
      'identity': self._identity,
      'progress': dataclasses.asdict(progress),
    }
    tree = _tree(held.params, held.inner_state, bases)
    return self._checkpoints.save(step, tree, meta, loss, held.release)

  def set_aside_after(self, step: int) -> None:
    """See `Checkpoints.set_aside_after`."""
    self._checkpoints.set_aside_after(step)

  def readable(self) -> tuple[int, ...]:
    """Returns the steps that seem to have a complete checkpoint."""
    return self._checkpoints.readable()

  def restore(
    self,
    params_like: Any,
    inner_like: Any,
    bases_like: Bases,
    step: int | None = None,
  ) -> Restored | None:
    """Restores the newest intact checkpoint; None if there is none.

    Args:
      params_like: shape, dtype and sharding of each parameter.
      inner_like: shape, dtype and sharding of each leaf of the inner state.
      bases_like: shape and dtype of each base.
      step: that checkpoint or none.

    Raises:
      BrokenRecord: it belongs to another learner or run; names what differs.
    """
    likes = _tree(params_like, inner_like, bases_like)
    found = self._checkpoints.restore(likes, self._check, step)
    if found is None:
      return None
    return Restored(
      params=found.arrays['params'],
      inner_state=found.arrays['inner_state'],
      bases=found.arrays['bases'],
      progress=read_progress(found.meta['progress']),
      path=found.path,
    )

  def wait(self, timeout_s: float) -> bool:
    """Waits for the save in progress; returns True if it is over."""
    return self._checkpoints.wait(timeout_s)

  def close(self, timeout_s: float) -> None:
    """Waits for the save in progress."""
    self._checkpoints.close(timeout_s)

  def _check(self, meta: dict) -> None:
    theirs = dict(meta['identity'])
    steps = self._identity.get(TOTAL_STEPS), theirs.get(TOTAL_STEPS)
    if None not in steps and int(steps[0]) > int(steps[1]):
      theirs[TOTAL_STEPS] = steps[0]
    # A key that is newer than the checkpoint is not in it; the syncer, whose
    # ledger lacks it, too, admits only the key's default then.
    differing = [
      f'{key}: {self._identity.get(key, "absent")} here, {value} there'
      for key, value in sorted(theirs.items())
      if self._identity.get(key) != value
    ]
    if differing:
      raise BrokenRecord(
        f'{self._folder} is not of this learner and run: '
        + '; '.join(differing)
      )


def _tree(params, inner_state, bases: Bases) -> dict[str, Any]:
  return {
    'params': params,
    'inner_state': inner_state,
    'bases': {p: dict(pieces) for p, pieces in bases.items()},
  }


def read_progress(fields: dict) -> LearnerProgress:
  """Converts JSON fields to progress; the inverse of `dataclasses.asdict`."""
  return LearnerProgress(
    **{k: tuple(v) if type(v) is list else v for k, v in fields.items()}
  )
