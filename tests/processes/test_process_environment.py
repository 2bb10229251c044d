# SPDX-License-Identifier: Apache-2.0
"""A learner in the wrong environment says so in a line, and ends."""

import pytest

from tests.processes.processes import EXIT_CONFIG, Processes

pytestmark = pytest.mark.beside

LEARNER = ('diloco.learner', '--learner=0', '--syncer=127.0.0.1:1')


def _error(tmp_path, environment: dict[str, str], code: int) -> str:
  with Processes(tmp_path) as processes:
    learner = processes.start('it', *LEARNER, environment=environment)
    assert processes.exit_code(learner) == code, learner.output
    assert 'Traceback' not in learner.output
    (error,) = learner.errors
  return error


@pytest.mark.parametrize(
  ('name', 'value'),
  [('MEGASCALE_COORDINATOR_ADDRESS', '10.0.0.1:8080'), ('MEGASCALE_PORT', '')],
)
def test_never_one_world_with_another_slice(tmp_path, name, value):
  error = _error(tmp_path, {name: value}, EXIT_CONFIG)
  assert error.startswith(f'error: {name}: joins slices')


def test_platforms_without_the_cpu(tmp_path):
  error = _error(tmp_path, {'JAX_PLATFORMS': 'cuda'}, EXIT_CONFIG)
  assert error.endswith('make it JAX_PLATFORMS=cuda,cpu')


def test_an_accelerator_that_jax_passes_over(tmp_path):
  """Without a plugin for it, jax would take the CPU and say nothing."""
  error = _error(tmp_path, {'JAX_PLATFORMS': 'cuda,cpu'}, EXIT_CONFIG)
  assert error.startswith("error: JAX_PLATFORMS=cuda,cpu: jax has no 'cuda'")


def test_an_accelerator_that_can_not_be_opened(tmp_path):
  """Exit code 1: another process may have it, and give it back."""
  error = _error(tmp_path, {'JAX_PLATFORMS': 'rocm,cpu'}, 1)
  assert error.startswith('error: JAX_PLATFORMS=rocm,cpu: Unable to init')


def test_a_syncer_that_is_not_there_is_named_before_anything_is_compiled(
  tmp_path,
):
  with Processes(tmp_path) as processes:
    learner = processes.start('it', *LEARNER)
    processes.until(
      lambda: 'still no syncer' in learner.output, 120.0, 'it has compiled'
    )
    said = learner.output.partition('still no syncer')[0]
  assert 'no syncer at 127.0.0.1:1 yet' in said
