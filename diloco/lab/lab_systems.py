# SPDX-License-Identifier: Apache-2.0
"""The systems of the lab by name; importing this imports no jax."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class LabSystem:
  """A way to train in the lab.

  Attributes:
    load: returns the class whose `run` makes the run, as `lab.run.train` calls
      it.
    has_syncer: True if learners come and go, and a syncer can be killed.
    is_elastic: True if one program goes on without the learners that are dead.
    is_alone: True if there is one learner, however many are configured.
  """

  load: Callable[[], type]
  has_syncer: bool = False
  is_elastic: bool = False
  is_alone: bool = False

  def learners(self, configured: int) -> int:
    """Returns how many learners train."""
    return 1 if self.is_alone else configured


def _decoupled() -> type:
  from diloco.lab.decoupled import Decoupled

  return Decoupled


def _data_parallel() -> type:
  from diloco.lab.data_parallel import DataParallel

  return DataParallel


SYSTEMS = {
  'decoupled': LabSystem(_decoupled, has_syncer=True),
  'data_parallel': LabSystem(_data_parallel),
  'elastic': LabSystem(_data_parallel, is_elastic=True),
  'alone': LabSystem(_data_parallel, is_alone=True),
}
