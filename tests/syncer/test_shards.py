# SPDX-License-Identifier: Apache-2.0
"""S shards merge what one syncer would, to the bit."""

import numpy as np
import pytest

from diloco.checkpoint.parameters import read_parameters
from tests.in_process.in_process import Run
from tests.transport.faulty import Faults

pytestmark = pytest.mark.beside

# Synchronous, so that two runs can be alike.
ALIKE = {'overlap_steps': 0, 'quorum': 2, 'total_steps': 24}


def _final(folder, **options):
  folder.mkdir()
  run = Run(folder, Faults(), **ALIKE, **options)
  run.finish()
  return run, read_parameters(run.workdir.parameters)


@pytest.mark.parametrize('embedding', ['split', 'own'])
def test_shards_make_the_parameters_that_one_syncer_makes(tmp_path, embedding):
  options = {'fragments': 2, 'embedding': embedding}
  run, expected = _final(tmp_path / 'one', **options)
  sharded, found = _final(tmp_path / 'two', shards=2, **options)
  owners = sharded.run_spec.owners
  assert all(owners.of_shard(shard) for shard in (0, 1))
  assert found.keys() == expected.keys()
  for path, array in expected.items():
    np.testing.assert_array_equal(found[path], array, path)
  rounds = [
    [(x['round'], x['version'], x['crc']) for x in each.tape('Publish')]
    for each in (run, sharded)
  ]
  assert rounds[0] == rounds[1] != []
