# SPDX-License-Identifier: Apache-2.0
"""The prediction for the largest model, of a known power law of the size."""

import math

import numpy as np
import pytest

from experiments import scaling


def law(name: str) -> float:
  return 8.0 * (scaling.SIZES[name][0] / 47e3) ** -0.8


def test_a_power_law_is_continued():
  found = {name: [law(name)] * 3 for name in scaling.SMALLER}
  value, half_width = scaling.predicted(found)
  assert value == pytest.approx(law(scaling.LARGEST))
  assert half_width == pytest.approx(0, abs=1e-6)


def test_its_interval_has_the_truth_as_often_as_it_says():
  """95 % of draws of noise, and of 400 within four standard deviations."""
  random, held, draws = np.random.default_rng(0), 0, 400
  for _ in range(draws):
    found = {
      name: [law(name) + 0.3 * random.standard_normal() for _ in range(3)]
      for name in scaling.SMALLER
    }
    value, half_width = scaling.predicted(found)
    held += abs(value - law(scaling.LARGEST)) <= half_width
  spread = math.sqrt(0.95 * 0.05 / draws)
  assert abs(held / draws - 0.95) < 4 * spread


def test_sizes_are_those_of_the_models():
  from diloco.config import run_config
  from diloco.run.spec import make_run_spec

  for parameters, width, _ in scaling.SIZES.values():
    config = scaling.get_config()
    config.model.update(d_model=width, d_ff=3 * width)
    made = make_run_spec(run_config.build(config), reads_text=False)
    assert made.parameters == pytest.approx(parameters, rel=0.02)
