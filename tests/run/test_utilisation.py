# SPDX-License-Identifier: Apache-2.0
"""MFU by hand, and none where the peak or the arithmetic is unknown."""

import pytest

from diloco.config import run_config
from diloco.metrics import names
from diloco.models import flops
from diloco.run.spec import decoder_config
from diloco.run.step_profiler import Utilisation
from experiments import tests_tiny


def _config(**model):
  config = tests_tiny.get_config()
  config.model.update(**model)
  return run_config.build(config)


def test_a_step_as_fast_as_the_chip_is_one():
  config = _config()
  found = flops.step_flops(decoder_config(config), batch=4, seq_len=32)
  least_s = found.total / 197e12
  for step_s, mfu in ((least_s, 1.0), (4 * least_s, 0.25)):
    scalars = Utilisation(config, 'TPU v5 lite').scalars(step_s)
    assert scalars == {names.MFU: pytest.approx(mfu)}


def test_all_chips_of_the_learner_count():
  config = tests_tiny.get_config()
  config.mesh.fsdp = 4
  one = Utilisation(_config(), 'TPU v5').scalars(1.0)[names.MFU]
  four = Utilisation(run_config.build(config), 'TPU v5').scalars(1.0)[names.MFU]
  assert four == pytest.approx(one / 4)


@pytest.mark.parametrize(
  ('model', 'kind'), [({}, 'cpu'), ({'kind': 'bowl'}, 'TPU v5')]
)
def test_nothing_is_said_of_what_is_not_known(model, kind):
  assert Utilisation(_config(**model), kind).scalars(1.0) == {}
