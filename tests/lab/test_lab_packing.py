# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of the lab is made of answers and packed arrays."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco.lab.packing import Likes, Packer, Unpacker
from diloco.lab.resume_log import Answers, Diverged
from diloco.learner.replica import FragmentReplica
from diloco.numerics.outer import FragmentState


def _mesh():
  return jax.sharding.Mesh(np.array(jax.devices()[:1]), ('fsdp',))


def _through(value, trees=()):
  """Packed, written as JSON, read, unpacked."""
  packer = Packer()
  plain = json.loads(json.dumps(packer.plain(value)))
  arrays = {name: np.asarray(x) for name, x in packer.arrays.items()}
  return Unpacker(arrays, Likes(_mesh(), trees)).value(plain), arrays


def test_records_and_optimizer_states_come_back():
  theta = {'w': np.arange(3, dtype=np.float32)}
  state = optax.adam(0.1).init(theta)
  made, _ = _through(
    {7: [FragmentState(theta, state, theta, 4), None, (1, 'x', 0.1)]},
    trees=state,
  )
  found, nothing, plain = made[7]
  assert jax.tree.structure(found.optimizer_state) == jax.tree.structure(state)
  np.testing.assert_array_equal(found.theta['w'], theta['w'])
  assert (found.version, nothing, plain) == (4, None, (1, 'x', 0.1))


def test_an_array_in_two_places_is_saved_once():
  theta = {'w': np.ones(3, np.float32)}
  made, arrays = _through([FragmentReplica(1, theta, 2), theta])
  assert len(arrays) == 1
  assert made[0].theta['w'] is made[1]['w']


def test_arrays_come_back_to_where_they_lay():
  spread = jax.sharding.NamedSharding(
    _mesh(), jax.sharding.PartitionSpec('fsdp', None)
  )
  placed = jax.device_put(np.ones((2, 2), np.float32), spread)
  made, _ = _through([placed, jnp.zeros(2, jnp.bfloat16), np.ones(1)])
  assert made[0].sharding == spread
  assert made[1].dtype == jnp.bfloat16
  assert isinstance(made[2], np.ndarray)


def test_what_can_not_be_packed_is_named():
  with pytest.raises(TypeError, match='set can not be saved'):
    Packer().plain([{1, 2}])


def test_answers_are_given_again(tmp_path):
  path = tmp_path / 'answers'
  first = Answers(path, ())
  loss = first.of('step', lambda: 1 / 3)
  assert first.of('take in', lambda: None) is None
  first.close()
  known = [tuple(json.loads(line)) for line in path.read_text().splitlines()]
  second = Answers(path, known)
  assert second.of('step', lambda: pytest.fail('made anew')) == loss
  with pytest.raises(Diverged, match='1 questions for 2 answers'):
    second.go_live()
  with pytest.raises(Diverged, match="answer 1 is to 'take in', not 'look'"):
    second.of('look', lambda: 1.0)
  assert second.of('take in', lambda: 'no') is None
  second.go_live()
  assert second.of('step', lambda: 2.0) == 2.0
  second.close()
  assert len(path.read_text().splitlines()) == 3


def test_more_questions_than_answers():
  answers = Answers(None, [('step', 1.0)])
  answers.of('step', lambda: 1.0)
  with pytest.raises(Diverged, match="answer 1 is to 'nothing', not 'step'"):
    answers.of('step', lambda: 1.0)
