# SPDX-License-Identifier: Apache-2.0
"""2N steps are N, a save, fresh objects from it, and N more: to the bit.

Saved is at a quiescent boundary: no round is open, θ has taken in every
version that is closed, and no step was made since the last offer. Only there
nothing is on its way, and a restarted learner's next offer falls due when it
would have. At τ = 0 each boundary with a close is one.

At τ > 0 there is none: θ takes in an update some steps after its offer, and a
restarted learner counts anew to its next one. So there the run that goes on
from the disk is held against one that begins again with what was in memory.
"""

import jax
import numpy as np
import pytest

from diloco.run.spec import RunSpec
from tests.in_process import lockstep
from tests.in_process.lockstep import Lockstep, toy_config

LEARNERS = 2
N = 24


def _config(**protocol):
  """AdamW, int4 both ways with error feedback, Nesterov momentum."""
  config = toy_config(
    learners=LEARNERS,
    quorum=LEARNERS,
    fragments=2,
    sync_every_steps=8,
    **protocol,
  )
  config.inner.update(optimizer='adamw', lr=0.01)
  config.codec.update(up='int4', down='int4', error_feedback=True)
  config.outer.update(lr=0.7, momentum=0.9, nesterov=True)
  config.merge.update(rule='rda')
  return config


def _bits(lock: Lockstep) -> dict[str, bytes]:
  """Everything that has bytes, by name."""
  fragments = range(lock.run_spec.config.protocol.fragments)
  trees = {f'syncer {p}': lock.model.state(p) for p in fragments}
  for each in lock.learners:
    trees[f'θ {each.id}'] = each.params
    trees[f'moments {each.id}'] = each.inner_state
  found = {}
  for name, tree in trees.items():
    leaves = jax.tree_util.tree_leaves_with_path(_plain(tree))
    for path, leaf in leaves:
      key = f'{name} {jax.tree_util.keystr(path)}'
      found[key] = np.asarray(leaf).tobytes()
  return found


def _plain(tree):
  """An outer state's arrays; other trees are ones already."""
  if not hasattr(tree, 'residual'):
    return tree
  return {
    'theta': dict(tree.theta),
    'residual': dict(tree.residual),
    'outer': tree.optimizer_state,
    'version': tree.version,
  }


@pytest.fixture(scope='module')
def synchronous(tmp_path_factory):
  """Runs 2N steps: without a break, and restored after N."""
  folder = tmp_path_factory.mktemp('saved')
  config = _config(overlap_steps=0, blend='replace')
  whole = Lockstep(config, LEARNERS, 0, lockstep.toy_model())
  whole.run(N)
  half = Lockstep(config, LEARNERS, 0, lockstep.toy_model(), folder)
  half.run(N)
  assert _bits(half) == _bits(whole)
  half.save()
  with pytest.MonkeyPatch.context() as patch:  # Nothing is drawn, to be let go.
    patch.setattr(RunSpec, 'initial_parameters', None)
    again = Lockstep(config, LEARNERS, 0, lockstep.toy_model(), folder, 2)
  return whole, half, again


def test_what_is_restored_is_what_was_saved(synchronous):
  _, half, again = synchronous
  assert _bits(again) == _bits(half)
  assert again.syncer.ledger().versions == half.syncer.ledger().versions


@pytest.fixture(scope='module')
def gone_on(synchronous):
  """The run without a break and the restored one, N steps later."""
  whole, _, again = synchronous
  before = len(whole.published)
  whole.run(N)
  again.run(N)
  return whole, again, whole.published[before:]


def test_a_restored_run_goes_on_to_the_bit(gone_on):
  whole, again, _ = gone_on
  assert _bits(again) == _bits(whole)


def test_its_rounds_have_the_same_numbers_and_weights(gone_on):
  _, again, later = gone_on
  assert later
  assert [_told(p) for p in later] == [_told(p) for p in again.published]


def _told(publish):
  shares = tuple((s.learner, s.step, s.weight) for s in publish.shares)
  return publish.round, publish.fragment, publish.version, shares


def test_with_overlap_and_rebase_the_disk_loses_no_bit(tmp_path):
  config = _config(overlap_steps=2, blend='rebase')
  half = Lockstep(config, LEARNERS, 2, lockstep.toy_model(), tmp_path)
  half.run(N + 2)  # The last round's update was taken in: none is open.
  state = half.learners[0].machine.snapshot()
  assert all(f.base == f.host == f.announced for f in state.fragments)
  half.save()
  again = [
    Lockstep(config, LEARNERS, 2, lockstep.toy_model(), tmp_path, 2 + i)
    for i in range(2)
  ]
  for mine, theirs in zip(half.learners, again[0].learners):
    again[0].model = half.model  # What was in memory, not what was written.
    theirs.params, theirs.inner_state = mine.params, mine.inner_state
    theirs.host._held = list(mine.host._held)
    theirs._own = mine._own.copy()
  for each in again:
    each.run(N)
  assert again[1].published
  assert _bits(again[0]) == _bits(again[1])
