# SPDX-License-Identifier: Apache-2.0
"""An offer holds a learner's own work and nothing else, under every blend.

Values are dyadic, so that sums are exact and equality is to the bit.
"""

import jax
import numpy as np
import pytest

from diloco.config import run_config
from diloco.learner.local_delta import LocalDelta
from diloco.learner.programs import LearnerPrograms
from diloco.numerics.blend import RULES
from diloco.protocol.learner.events import Apply
from diloco.run.spec import make_run_spec
from tests.in_process.lockstep import toy_config, toy_model

OTHERS = 0.5  # What an update brings, everywhere.


class _Own:
  """A learner of one fragment that steps only when `train` is called."""

  def __init__(self, blend: str):
    config = toy_config(
      learners=2, fragments=1, sync_every_steps=4, overlap_steps=1, blend=blend
    )
    if blend == 'interpolate':
      config.protocol.blend_alpha = 0.5
    run_spec = make_run_spec(run_config.build(config), toy_model())
    self._programs = LearnerPrograms(run_spec)
    rounded = [
      {name: np.round(x * 64) / 64 for name, x in theta.items()}
      for theta in run_spec.initial_fragments()
    ]
    params, _ = self._programs.init(run_spec.initial_parameters())
    placed = self._programs.put_fragment(0, rounded[0])
    self._params = self._programs.replace(0, params, placed)
    self._own = LocalDelta(
      self._programs, blend, dict(enumerate(rounded)), self._params
    )
    self._own_blend = blend
    self._rebases = blend == 'rebase'
    self._keep = ()
    self._of_base = ()  # Handles of offers on the base of now.
    self._version = 0

  def restart(self):
    """Restores: only θ and the bases are known."""
    self._own = LocalDelta(
      self._programs, self._own_blend, self._own.bases, self._params
    )

  def train(self, progress: float):
    """θ += progress."""
    self._params = jax.tree.map(lambda x: x + progress, self._params)

  def offer(self, handle: int) -> set[float]:
    """The values of the outer gradient."""
    theta = self._own.snapshot(0, self._params, handle, self._keep)
    self._keep = (*self._keep, handle)
    self._of_base = (*self._of_base, handle)
    reference = self._own.reference(0)
    return {
      float(v)
      for name in theta
      for v in np.unique(np.asarray(reference[name]) - np.asarray(theta[name]))
    }

  def update(self, merged: int = 0):
    """Θ_p of the next version; `merged`: the own offer that it has."""
    self._version += 1
    base = self._own.bases[0]
    theta = {name: x + np.float32(OTHERS) for name, x in base.items()}
    placed = self._programs.put_fragment(0, theta)
    if merged:
      self._keep = ()
    carries = self._rebases and merged in self._of_base
    said = Apply(0, self._version, carries, merged, self._keep)
    self._of_base = ()
    self._params = self._own.take_in(
      0, self._params, theta, placed, said, training=True
    )


@pytest.mark.parametrize('blend', RULES)
def test_who_learns_nothing_offers_nothing(blend):
  own = _Own(blend)
  own.update()
  assert own.offer(1) == {0.0}
  own.update()
  assert own.offer(2) == {0.0}
  own.update(merged=2)
  assert own.offer(3) == {0.0}
  own.update()
  own.update(merged=3)
  assert own.offer(4) == {0.0}


def test_rebase_keeps_what_came_after_the_copy_that_was_merged():
  own = _Own('rebase')
  own.train(0.25)
  assert own.offer(1) == {-0.25}
  own.update()  # Without it: the update overwrites.
  assert own.offer(2) == {0.0}
  own.train(0.125)
  assert own.offer(3) == {-0.125}
  own.train(0.0625)
  own.update(merged=3)
  assert own.offer(4) == {-0.0625}


def test_rebase_counts_from_the_copy_that_was_merged_not_the_newest():
  own = _Own('rebase')
  own.train(0.25)
  own.offer(1)
  own.train(0.125)
  own.offer(2)
  own.update(merged=1)
  assert own.offer(3) == {-0.125}


@pytest.mark.parametrize('blend', ['replace', 'interpolate'])
def test_the_others_offer_what_came_since_the_update(blend):
  own = _Own(blend)
  own.train(0.25)
  own.offer(1)
  own.update()
  own.train(0.125)
  assert own.offer(2) == {-0.125}


def test_interpolate_offers_after_a_restart_only_what_came_since():
  """The process before has left what a checkpoint does not tell from work."""
  own = _Own('interpolate')
  own.train(0.25)
  own.update()
  own.train(0.125)
  own.restart()
  assert own.offer(1) == {0.0}
  own.train(0.0625)
  assert own.offer(2) == {-0.0625}
