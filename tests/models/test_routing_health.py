# SPDX-License-Identifier: Apache-2.0
"""Learners' routers are compared, by examples worked by hand."""

import math

import numpy as np
import pytest

from diloco.models import routing


def test_router_distance_is_relative_and_of_routers_alone():
  # ‖(1, 0) − (0, 1)‖ = √2, ‖mean‖ = ‖(.5, .5)‖ = √2 / 2: 2.
  one = {'layers/mlp/router': np.array([1.0, 0.0]), 'norm': np.zeros(3)}
  other = {'layers/mlp/router': np.array([0.0, 1.0]), 'norm': np.ones(3)}
  assert routing.router_distance([one, other]) == pytest.approx(2)
  assert routing.router_distance([one, one]) == 0


def test_overlap_is_of_sets():
  one = [[[[0, 1], [2, 3]]]]
  turned = [[[[1, 0], [3, 2]]]]
  half = [[[[1, 2], [3, 0]]]]
  none = [[[[2, 3], [0, 1]]]]
  assert routing.top_k_overlap(np.array([one, turned])) == 1
  assert routing.top_k_overlap(np.array([one, half])) == 0.5
  assert routing.top_k_overlap(np.array([one, none])) == 0
  # Pairs: 1, 0 and 0.
  three = routing.top_k_overlap(np.array([one, turned, none]))
  assert three == pytest.approx(1 / 3)


def test_divergence_is_from_nothing_to_log_m():
  apart = np.eye(3)[:, None, None, None]
  assert routing.routing_divergence(apart) == pytest.approx(math.log(3))
  same = np.broadcast_to([0.2, 0.3, 0.5], (4, 1, 2, 5, 3))
  assert routing.routing_divergence(same) == pytest.approx(0, abs=1e-12)


def test_utilisation_is_the_mean_over_layers():
  layers = np.array([[[[0], [1], [2], [3]]], [[[1], [1], [1], [1]]]])
  found = routing.utilisation_entropy(layers, 4)
  assert found == pytest.approx(0.5)


def test_a_spike_is_the_rise_over_a_blend():
  losses = [5.0, 4.0, 4.5, 4.0, 3.0]
  # Blends after steps 2 (twice) and 3: rises .5 and −.5; 0 and 5 have none.
  assert routing.loss_spike(losses, [0, 2, 2, 5]) == pytest.approx(0.5)
  assert routing.loss_spike(losses, [2, 3]) == pytest.approx(0)
  assert math.isnan(routing.loss_spike(losses, []))
