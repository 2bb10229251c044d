# SPDX-License-Identifier: Apache-2.0
"""A real syncer in a thread, for the tests that speak with it word by word."""

import pytest

from tests.syncer.spoken import Stage, small_run_spec


@pytest.fixture(scope='session')
def small_run():
  """Returns the run specification of a small run; nothing changes it."""
  return small_run_spec()


@pytest.fixture
def stage(small_run, tmp_path):
  """A syncer that runs; what its thread raises, the end of the test raises."""
  stage = Stage(small_run, tmp_path)
  stage.start()
  yield stage
  stage.close()
