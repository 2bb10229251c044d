# SPDX-License-Identifier: Apache-2.0
"""No chip has the logits of all its tokens, or a square of the length; 12 B are
evaluated on a slice of 8 small ones.
"""

import json
import pathlib

import pytest

from diloco.models import vocabulary
from tests.commands import ROOT, python

HERE = pathlib.Path(__file__).parent
V5E_BYTES = 16 * 10**9

pytestmark = pytest.mark.soak


def _compiled(script: str, *arguments) -> dict:
  pytest.importorskip('libtpu')
  done = python(*(HERE / script, *arguments), PYTHONPATH=str(ROOT))
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


def test_a_step_has_neither():
  found = _compiled('compiled_shapes.py', 'auto', vocabulary.LOGITS_MAX)
  assert found['kernel']
  assert found['squares'] == found['of_all_tokens'] == []


def test_without_kernel_and_chunks_it_has_both():
  """Else the test above would pass for arrays that are written otherwise."""
  found = _compiled('compiled_shapes.py', 'xla', 1 << 40)
  assert not found['kernel']
  assert found['squares'] and found['of_all_tokens']


def test_twelve_billion_are_evaluated_on_eight_small_chips():
  found = _compiled('compiled_evaluation.py')
  # Parameters alone are 6 GB of each.
  assert 6e9 < min(found.values()) <= max(found.values()) < V5E_BYTES, found
