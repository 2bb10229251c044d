# SPDX-License-Identifier: Apache-2.0
"""Compiled programs that a next process finds, and only the same one."""

import jax
import numpy as np
import pytest

from diloco.learner.kept_programs import KeptPrograms

WORLD = {'config': 'a', 'host': '0 of 2'}


@pytest.fixture(autouse=True)
def cached():
  """JAX's cache is off beside kept programs; other tests have it."""
  before = jax.config.jax_enable_compilation_cache
  yield
  jax.config.update('jax_enable_compilation_cache', before)


def compiled() -> jax.stages.Compiled:
  like = jax.ShapeDtypeStruct((3,), np.float32)
  return jax.jit(lambda x: {'twice': 2 * x}).lower(like).compile()


def never() -> jax.stages.Compiled:
  raise AssertionError('compiled again')


def test_a_program_is_found_by_the_next_process(tmp_path):
  KeptPrograms(tmp_path, WORLD).get('snapshot 1', compiled)
  found = KeptPrograms(tmp_path, WORLD).get('snapshot 1', never)
  (result,) = found(np.arange(3, dtype=np.float32)).values()
  np.testing.assert_array_equal(result, [0, 2, 4])


@pytest.mark.parametrize('changed', [{'host': '0 of 3'}, {'config': 'b'}])
def test_another_world_compiles_its_own(tmp_path, changed):
  KeptPrograms(tmp_path, WORLD).get('step', compiled)
  with pytest.raises(AssertionError, match='compiled again'):
    KeptPrograms(tmp_path, {**WORLD, **changed}).get('step', never)
