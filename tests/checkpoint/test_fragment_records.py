# SPDX-License-Identifier: Apache-2.0
"""Each fragment's file of the last close is there, or is named."""

import numpy as np
import pytest

from diloco.checkpoint.fragment_records import FragmentRecords
from diloco.checkpoint.volumes import BrokenRecord
from diloco.numerics import outer

OPTIMIZER = outer.make_outer(0.4, 0.8)


def _state(version):
  theta = {'w': np.full((2, 3), version, np.float32)}
  return outer.init(theta, OPTIMIZER, version)


def test_a_round_that_was_not_committed_did_not_close(tmp_path):
  """Killed between the fragment's file and the ledger."""
  records = FragmentRecords(tmp_path)
  records.write(0, _state(1))
  records.forget_older((1,))
  records.write(0, _state(2))
  found = records.read(0, 1, _state(0))
  assert found.version == 1
  np.testing.assert_array_equal(found.theta['w'], _state(1).theta['w'])


def test_old_files_do_not_pile_up(tmp_path):
  records = FragmentRecords(tmp_path)
  for version in range(1, 6):
    records.write(0, _state(version))
    records.forget_older((version,))
  assert len(list(tmp_path.glob('fragment-*'))) == 1


def test_a_broken_file_is_named(tmp_path):
  records = FragmentRecords(tmp_path)
  records.write(0, _state(1))
  [path] = tmp_path.glob('fragment-*')
  path.write_bytes(path.read_bytes()[:100])
  with pytest.raises(BrokenRecord, match=path.name):
    records.read(0, 1, _state(0))


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(BrokenRecord, match='fragment-000-000003'):
    FragmentRecords(tmp_path).read(0, 3, _state(0))
