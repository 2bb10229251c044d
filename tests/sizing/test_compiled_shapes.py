# SPDX-License-Identifier: Apache-2.0
"""No chip has the logits of all its tokens, or a square of the length."""

import json
import pathlib

import pytest

from diloco.models import vocabulary
from tests.commands import ROOT, python

SCRIPT = pathlib.Path(__file__).parent / 'compiled_shapes.py'

pytestmark = pytest.mark.soak


def _compiled(attention: str, logits_max: int) -> dict:
  pytest.importorskip('libtpu')
  done = python(*(SCRIPT, attention, logits_max), PYTHONPATH=str(ROOT))
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


def test_a_step_has_neither():
  found = _compiled('auto', vocabulary.LOGITS_MAX)
  assert found['kernel']
  assert found['squares'] == found['of_all_tokens'] == []


def test_without_kernel_and_chunks_it_has_both():
  """Else the test above would pass for arrays that are written otherwise."""
  found = _compiled('xla', 1 << 40)
  assert not found['kernel']
  assert found['squares'] and found['of_all_tokens']
