# SPDX-License-Identifier: Apache-2.0
"""Nothing that saves, or gives to a newcomer, copies θ in the train loop."""

import queue

import jax
import numpy as np
import pytest

from diloco.checkpoint import orbax_files, store
from diloco.learner import restore
from diloco.protocol import host_messages
from diloco.protocol.learner import events as learner_events
from tests.checkpoint import lone_learner

pytestmark = pytest.mark.alone

MILLIONS = 0.001
SAVE_S = 60.0


@pytest.fixture(scope='module')
def run_spec():
  return lone_learner.run_spec_of(MILLIONS)


@pytest.fixture
def learner(run_spec, tmp_path):
  """Yields a train loop without a syncer that has made three steps."""
  measured = lone_learner.LoneLearner(run_spec, tmp_path)
  measured.steps(3)
  yield measured
  measured.records.close(SAVE_S)


@pytest.fixture
def gate(monkeypatch):
  """Returns a queue: each item in it lets one save be written."""
  passes = queue.SimpleQueue()
  write = store.Checkpoints._write

  def wait_and_write(self, *arguments):
    passed = passes.get()
    if isinstance(passed, Exception):
      raise passed
    write(self, *arguments)

  monkeypatch.setattr(store.Checkpoints, '_write', wait_and_write)
  return passes


def _bits(tree) -> list[bytes]:
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def _buffers(tree) -> set[int]:
  """Returns where the arrays are in memory, without the scalars."""
  leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim]
  return {
    leaf.unsafe_buffer_pointer() for leaf in jax.block_until_ready(leaves)
  }


def _addresses(tree) -> set[int]:
  """Returns where the values are that Orbax reads."""
  return {np.asarray(leaf).ctypes.data for leaf in jax.tree.leaves(tree)}


def _theta(learner):
  loop = learner.loop
  return loop._state.params, loop._state.inner_state


def _restored(learner):
  """Returns rows, θ and inner state as another process finds them."""
  programs = learner.programs
  bases = {p: dict(x) for p, x in learner.loop._state.own.bases.items()}
  found = learner.records.restore_state(
    programs.params_like, programs.state_like, bases
  )
  arrays = found.arrays
  rows = found.meta['progress']['rows']
  return rows, (arrays['params'], arrays['optimizer'])


def test_a_double_buffered_step_gives_the_same_bits_and_leaves_what_it_is_given(
  run_spec, learner
):
  programs = learner.programs
  params, state = programs.init(run_spec.initial_parameters())
  given = _bits((params, state))
  batch = programs.put_batch(learner.batch)
  spare = (
    programs.zeros(programs.params_like),
    programs.zeros(programs.state_like),
  )
  beside = programs.step_double_buffered(
    params, state, batch, 0.1, (0, 7), spare
  )
  beside_bits = _bits(beside)
  assert _bits((params, state)) == given
  assert jax.tree.leaves(spare)[0].is_deleted()
  assert _bits(programs.step(params, state, batch, 0.1, (0, 7))) == beside_bits


def test_the_loop_copies_nothing_where_it_saves(learner, gate, monkeypatch):
  """Issue: `Checkpoints.save` copied θ and the moments in the train loop."""
  written = []
  save = orbax_files.save

  def seen(path, tree, *texts):
    written.append(_addresses((tree['params'], tree['optimizer'])))
    save(path, tree, *texts)

  monkeypatch.setattr(orbax_files, 'save', seen)
  held = _buffers(_theta(learner))
  learner.loop._save()
  learner.steps(1)
  assert not held & _buffers(_theta(learner))  # They stay as they are.
  gate.put(None)
  assert learner.records.wait(SAVE_S)
  [addresses] = written  # Not a copy: what Orbax reads is what is held.
  assert held <= addresses


def test_what_is_saved_is_of_its_step_although_training_goes_on(learner, gate):
  rows, expected = learner.loop._rows, _bits(_theta(learner))
  learner.loop._save()
  learner.steps(4)
  gate.put(None)
  assert learner.records.wait(SAVE_S)
  assert learner.records.newest_step == learner.loop._saving_step
  found_at, found = _restored(learner)
  assert found_at == rows
  assert _bits(found) == expected


def test_the_same_buffers_are_used_by_all_saves(learner):
  first = _buffers(_theta(learner))
  sets = [first]
  for _ in range(4):
    learner.loop._save()
    learner.steps(1)
    assert learner.records.wait(SAVE_S)
    sets.append(_buffers(_theta(learner)))
    learner.steps(2)
  assert not sets[0] & sets[1]
  assert sets[2:] == [sets[0], sets[1], sets[0]]


def test_a_save_that_fails_says_why_and_gives_its_buffers_back(learner, gate):
  learner.loop._save()
  learner.steps(1)
  gate.put(OSError('no space left'))
  assert learner.records.wait(SAVE_S)
  assert learner.records.failed == 1
  assert 'OSError: no space left' in learner.said[0]
  assert learner.loop._newest_saved() == 0
  assert learner.loop._state.holder.ready
  learner.loop._save()
  gate.put(None)
  assert learner.records.wait(SAVE_S)
  assert learner.records.failed == 0 + 1


def test_a_blend_right_after_a_save_does_not_change_it(learner, gate):
  """It happens at the end of a run: no step comes between them."""
  expected = _bits(_theta(learner))
  loop = learner.loop
  loop._save()
  theta = loop._state.own.bases[0]
  placed = learner.programs.put_fragment(0, theta)
  blended = learner.programs.replace(
    0, loop._state.holder.to_blend(loop._state.params), placed
  )
  gate.put(None)
  assert learner.records.wait(SAVE_S)
  assert _bits(_restored(learner)[1]) == expected
  assert _bits(blended) != expected[: len(blended)]


def test_a_newcomer_is_given_the_state_of_its_boundary(learner):
  loop, given = learner.loop, []
  loop._client.donation_handles = lambda partition: ()
  loop._client.donate = lambda said, step, held, state: given.append(state)
  expected = _bits(loop._state.inner_state)
  loop._donate(learner_events.DonateState(1, 1, step=3))
  loop._state_before = _buffers(loop._state.inner_state)
  learner.steps(3)
  [held] = given
  assert _bits(held.inner_state) == expected
  assert _buffers(held.inner_state) == loop._state_before  # No copy.
  assert not loop._state.holder.ready
  held.release()
  held.release()
  assert loop._state.holder.ready


def test_hosts_go_on_from_one_step_and_set_newer_ones_aside(run_spec, learner):
  for more in (0, 2):
    learner.steps(more)
    learner.loop._save()
    assert learner.records.wait(SAVE_S)
  assert learner.records.readable() == (3, 5)
  source = host_messages.RestoreFrom(3)
  found = restore.restore(run_spec, learner.programs, learner.records, source)
  assert found.source.kind == 'checkpoint'
  assert learner.records.readable() == (3,)
