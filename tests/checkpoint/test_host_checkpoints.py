# SPDX-License-Identifier: Apache-2.0
"""A process among several saves and restores its own part, without waiting."""

import numpy as np
import pytest

from tests.checkpoint.host_checkpoints import SHAPE
from tests.learner.groups import printed_by_two

pytestmark = pytest.mark.beside


@pytest.fixture(scope='module')
def found(tmp_path_factory):
  """Returns what the two processes print."""
  folder = str(tmp_path_factory.mktemp('checkpoints'))
  return printed_by_two('tests.checkpoint.host_checkpoints', folder)


def test_the_other_process_need_not_save(found):
  assert found[0]['readable'] == []
  assert found[1]['readable'] == [2]  # keep_latest=1
  assert found[1]['failed'] == 0
  assert found[1]['meta'] == {'of': 1}


def test_its_own_part_comes_back(found):
  values = np.arange(24, dtype=np.float32).reshape(SHAPE)
  rows = [values[2:3] + 2, values[3:4] + 2]  # Of the devices 2 and 3 of 4.
  np.testing.assert_array_equal(found[1]['spread'], rows)
  np.testing.assert_array_equal(found[1]['same'], [values - 2] * 2)
  assert found[1]['host'] == [1] * 3
