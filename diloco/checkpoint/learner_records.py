# SPDX-License-Identifier: Apache-2.0
"""A learner's checkpoints: θ, its moments, bases and progress."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from diloco.checkpoint.arrays import BrokenRecord
from diloco.checkpoint.store import Checkpoint, Checkpoints, old_format
from diloco.protocol.config import BLEND, with_current_blend

# It may be larger than when a checkpoint was made: the run was extended.
TOTAL_STEPS = 'protocol.total_steps'
# Fragment -> piece -> f32 array: a numpy array, or where several hosts have the
# piece a jax array of all of them.
Bases = Mapping[int, Mapping[str, np.ndarray | jax.Array]]


@dataclasses.dataclass(frozen=True)
class HeldState:
  """θ and the inner state of one boundary.

  Attributes:
    params: θ; None if only the inner state is held.
    inner_state: the inner optimizer's state.
    release: from its call on, which may come from any thread, the arrays may be
      overwritten; a second call does nothing.
  """

  params: Any
  inner_state: Any
  release: Callable[[], None] = lambda: None


class LearnerRecords(Checkpoints):
  """A learner's checkpoints in one folder, for one thread of each host.

  Args:
    folder: used by this learner alone, and the same for all of its hosts.
    fingerprints: of the run; checkpoints with others are refused.
    keep_latest: see `Checkpoints`, as for the rest.

  Raises:
    BrokenRecord: the folder is of an earlier version of this program.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    learner: int,
    fingerprints: Mapping[str, str],
    keep_latest: int,
    say: Callable[[str], None],
    owned: bool = True,
  ):
    super().__init__(folder, keep_latest, say, owned)
    for path in folder.glob('host-*'):  # Each host had a folder of its own.
      raise BrokenRecord(old_format(path))
    self.learner = learner
    self._identity = {**fingerprints, 'learner': str(learner)}

  def save_state(
    self,
    step: int,
    held: HeldState,
    bases: Callable[[], Bases],
    progress: Mapping,
  ) -> bool:
    """Starts to save; see `Checkpoints.save`.

    Args:
      step: inner steps made; newer than all that was saved.
      held: θ and the inner state after that step; released.
      bases: returns Θ_p as last received, by fragment; called on a thread.
      progress: plain JSON; see `restore.progress_of`.
    """
    meta = {'identity': self._identity, 'progress': progress}
    params, state = held.params, held.inner_state
    return self.save(
      step, lambda: _tree(params, state, bases()), meta, held.release
    )

  def restore_state(
    self,
    params_like: Any,
    inner_like: Any,
    bases_like: Bases,
    step: int | None = None,
  ) -> Checkpoint | None:
    """Restores the newest intact checkpoint; None if there is none.

    Args:
      params_like: shape, dtype and sharding of each parameter.
      inner_like: shape, dtype and sharding of each leaf of the inner state.
      bases_like: shape, dtype and, for a jax array, sharding of each base.
      step: that checkpoint or none.

    Returns:
      Its arrays are 'params', 'optimizer' and 'bases'; its `meta` has the
      'progress' that was saved.

    Raises:
      BrokenRecord: it belongs to another learner or run; names what differs.
    """
    likes = _tree(params_like, inner_like, bases_like)
    return self.restore(likes, self._check, step)

  def _check(self, meta: dict) -> None:
    theirs = with_current_blend(meta['identity'], BLEND)
    steps = self._identity.get(TOTAL_STEPS), theirs.get(TOTAL_STEPS)
    if None not in steps and int(steps[0]) > int(steps[1]):
      theirs[TOTAL_STEPS] = steps[0]
    # A key that is newer than the checkpoint is not in it; the syncer, whose
    # ledger lacks it, too, admits only the key's default then. Nor is one here
    # that learners may have for themselves since.
    differing = [
      f'{key}: {self._identity[key]} here, {value} there'
      for key, value in sorted(theirs.items())
      if self._identity.get(key, value) != value
    ]
    if differing:
      raise BrokenRecord(
        f'{self._folder} is not of this learner and run: '
        + '; '.join(differing)
      )


def _tree(params, inner_state, bases: Bases) -> dict[str, Any]:
  return {
    'params': params,
    'optimizer': inner_state,
    'bases': {p: dict(pieces) for p, pieces in bases.items()},
  }
