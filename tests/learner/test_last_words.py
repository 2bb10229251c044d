# SPDX-License-Identifier: Apache-2.0
"""A host of several slices ends with its code though its log takes no line."""

import subprocess
import sys

import pytest

from diloco.learner.hosts.host_main import EXIT_SLICES

pytestmark = pytest.mark.beside

FULL_DISK = """
import resource, types
from diloco.learner.hosts import host_main

process = object.__new__(host_main._Process)
process._over, process._memory = False, types.SimpleNamespace(write=lambda: 7)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
"""


@pytest.mark.parametrize(
  'last, code',
  [
    ("process.end_world('a slice is gone')", EXIT_SLICES),
    ('host_main._die()', 1),
  ],
)
def test_a_full_disk_does_not_hold_up_the_end(tmp_path, last, code):
  """Issue: it waited for the others in JAX's clean-up, and was aborted."""
  with (tmp_path / 'log').open('w') as log:
    done = subprocess.run(
      [sys.executable, '-c', f'{FULL_DISK}\n{last}'], stderr=log, check=False
    )
  assert done.returncode == code
  assert (tmp_path / 'log').read_text() == ''
