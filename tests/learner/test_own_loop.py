# SPDX-License-Identifier: Apache-2.0
"""A loop of one's own: what it may hand over, and what is refused."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco.config.sections import ConfigError
from diloco.learner.own_loop import GivenPrograms, Learner, Sync, Tree
from diloco.models.given import given_model
from diloco.run.spec import make_run_spec

SYNC = Sync(every=12, fragments=2, learners=2, steps=10)


def params(dtype=jnp.float32):
  return {'a': [jnp.ones((3, 4), dtype), jnp.zeros((5,), dtype)]}


def programs(given, opt_state=()):
  tree = Tree(given)
  run_spec = make_run_spec(SYNC.run_config(), given_model(tree.table))
  return tree, GivenPrograms(run_spec, tree.flat(given), opt_state)


@pytest.mark.parametrize(
  ('given', 'roles', 'said'),
  [
    ({'a': jnp.ones((2,), jnp.int32)}, {}, 'a is int32[2], must be an array'),
    ({'a': 1.0}, {}, 'a is a float, must be an array'),
    ({'a': jnp.ones((0, 2))}, {}, 'a is float32[0, 2], must be an array'),
    (params(), {'b': 'stacked'}, "'b' is no parameter; there are a/0, a/1"),
    (params(), {'a/0': 'odd'}, "a/0='odd': must be one of plain, stacked"),
  ],
)
def test_other_trees_are_refused(given, roles, said):
  with pytest.raises(ConfigError, match=r'params|roles') as refused:
    Tree(given, roles)
  assert said in str(refused.value)


def test_a_key_that_does_not_exist_is_named():
  with pytest.raises(ConfigError, match=r'codec\.upp'):
    Sync(config={'codec.upp': 'int8'}).run_config()


def test_more_fragments_than_arrays_are_refused(tmp_path):
  with pytest.raises(ValueError, match='fragments=8 is too many'):
    Learner('127.0.0.1:1', params(), learner=0, sync=Sync(), workdir=tmp_path)


def test_a_boundary_that_can_not_be_is_refused(tmp_path):
  given = params()
  with Learner(
    '127.0.0.1:1', given, learner=0, sync=SYNC, workdir=tmp_path
  ) as learner:
    with pytest.raises(RuntimeError, match=r'learner\.start\(\) comes first'):
      learner.boundary(given, (), tokens=1, loss=0.0)
    learner._started = True
    with pytest.raises(ValueError, match=r'tokens=0: must be an integer, 1 or'):
      learner.boundary(given, (), tokens=0, loss=0.0)
    learner._started = False


def test_numpy_arrays_are_refused():
  with pytest.raises(ConfigError, match=r'a/0 is .*, must be a jax.Array'):
    programs(jax.tree.map(np.asarray, params()))


def test_typed_keys_are_refused():
  with pytest.raises(ConfigError, match=r'opt_state: key is .*key_data gives'):
    programs(params(), {'count': jnp.zeros((), int), 'key': jax.random.key(0)})


@pytest.mark.parametrize(
  ('changed', 'said'),
  [
    ({'a': [jnp.ones((4, 4)), jnp.zeros((5,))]}, r'a/0 is float32\[4, 4\]'),
    ({'a': [jnp.ones((3, 4)), jnp.zeros((5,), jnp.bfloat16)]}, 'a/1 is bfloat'),
    ({'a': [jnp.ones((3, 4))]}, 'params have the structure'),
  ],
)
def test_arrays_that_change_are_refused(changed, said):
  tree, exchange = programs(params())
  with pytest.raises(ValueError, match=said):
    exchange.check(tree.flat(changed))
  exchange.check(tree.flat(params()))


def test_another_sharding_of_the_same_device_is_the_same():
  tree, exchange = programs(params())
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ('x',))
  where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  exchange.check(tree.flat(jax.device_put(params(), where)))


def test_what_is_exchanged_is_f32_whatever_the_parameters_are_in():
  tree, exchange = programs(params(jnp.bfloat16))
  flat = tree.flat(params(jnp.bfloat16))
  copies = [exchange.snapshot(p, flat) for p in range(2)]
  assert {x.dtype for c in copies for x in c.values()} == {jnp.dtype('float32')}
  new = {name: np.full(x.shape, 2.5, 'f') for name, x in copies[0].items()}
  placed = exchange.put_fragment(0, new)
  after = exchange.replace(0, flat, placed)
  assert {x.dtype for x in after.values()} == {jnp.dtype('bfloat16')}
  assert sum(bool((x == 2.5).all()) for x in after.values()) == len(new)


def test_moments_lie_with_their_parameters():
  """A donor's moments are asked for by the boxes of the parameters."""
  opt_state = {'mu': params(), 'nu': params(), 'count': jnp.zeros(())}
  _, exchange = programs(params(), opt_state)
  partition = exchange.partition
  for name, splits in {
    'mu/a/0': partition.splits['a/0'],
    'nu/a/1': partition.splits['a/1'],
    'count': (),
  }.items():
    assert exchange.state_splits(name)(partition) == splits


@pytest.mark.parametrize(('peak', 'has_room'), [(760, True), (761, False)])
def test_a_copy_goes_to_the_host_where_the_device_lacks_room(peak, has_room):
  """17 values, as many moments and a count: a copy takes 140 bytes."""
  tree, exchange = programs(params(), {'mu': params(), 'count': jnp.zeros(())})
  stats = {'peak_bytes_in_use': peak, 'bytes_limit': 1000}
  device = types.SimpleNamespace(memory_stats=lambda: stats)
  exchange._mesh = types.SimpleNamespace(local_devices=[device])
  exchange.compile_copy_all()
  on_device, copy = [], exchange._copy_all
  exchange._copy_all = lambda arrays: on_device.append(arrays) or copy(arrays)
  flat = tree.flat(params())
  copied, _ = exchange.copy_all(flat, {})
  assert bool(on_device) == has_room
  for name, x in flat.items():
    np.testing.assert_array_equal(copied[name], x)
