# SPDX-License-Identifier: Apache-2.0
"""An evaluation on eight devices is that on one, and no device has all."""

import json
import pathlib

import numpy as np
import pytest

from tests.commands import ROOT, python

SCRIPT = pathlib.Path(__file__).parent / 'sharded_evaluation.py'


@pytest.mark.parametrize(
  ('kind', 'mesh'),
  [
    ('decoder', {'fsdp': 4, 'expert': 1, 'context': 1, 'tensor': 2}),
    ('moe', {'fsdp': 2, 'expert': 2, 'context': 1, 'tensor': 2}),
  ],
)
def test_eight_devices_evaluate_as_one(kind, mesh):
  done = python(
    *(SCRIPT, kind),
    JAX_NUM_CPU_DEVICES='8',
    JAX_PLATFORMS='cpu',
    PYTHONPATH=str(ROOT),
  )
  assert done.returncode == 0, done.stderr
  one, eight = json.loads(done.stdout)
  assert eight['mesh'] == mesh
  assert one['share'] == 1
  # Norms, and a router, are everywhere; along 'expert' all but the experts.
  assert eight['share'] < (0.15 if kind == 'decoder' else 0.25)
  assert eight['loss'] == pytest.approx(one['loss'], rel=1e-6)
  np.testing.assert_allclose(
    eight['likelihoods'], one['likelihoods'], rtol=1e-6
  )
  assert eight['text'] == one['text']
