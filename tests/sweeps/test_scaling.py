# SPDX-License-Identifier: Apache-2.0
"""The prediction for the largest model, of differences that follow a line."""

import math

import numpy as np
import pytest

from experiments import scaling


def line(name: str) -> float:
  return 20 - 1.5 * math.log(scaling.SIZES[name][0])


def test_a_line_is_continued():
  found = {name: [line(name)] * 3 for name in scaling.SMALLER}
  value, half_width = scaling.predicted(found)
  assert value == pytest.approx(line(scaling.LARGEST))
  assert half_width == pytest.approx(0, abs=1e-6)


def test_its_interval_has_the_truth_as_often_as_it_says():
  """95 % of draws of noise, and of 400 within four standard deviations."""
  random, held, draws = np.random.default_rng(0), 0, 400
  for _ in range(draws):
    found = {
      name: [line(name) + 0.3 * random.standard_normal() for _ in range(3)]
      for name in scaling.SMALLER
    }
    value, half_width = scaling.predicted(found)
    held += abs(value - line(scaling.LARGEST)) <= half_width
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
