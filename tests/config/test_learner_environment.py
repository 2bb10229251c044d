# SPDX-License-Identifier: Apache-2.0
"""Checks which environments of a learner are refused, and what is advised."""

import pytest

from diloco.config import hardware
from diloco.config.sections import ConfigError


@pytest.mark.parametrize(
  'given',
  [
    {},
    {'JAX_PLATFORMS': ''},
    {'JAX_PLATFORMS': 'cpu'},
    {'JAX_PLATFORMS': 'tpu,cpu'},
    {'JAX_PLATFORMS': 'cuda,rocm,cpu'},
    {'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.4'},
    {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'},
    {'NOT_MEGASCALE_': '1'},
  ],
)
def test_it_trains_with(given):
  hardware.check(given)


def test_slices_of_one_learner_are_joined():
  hardware.check({'MEGASCALE_NUM_SLICES': '2'}, slices=2)


@pytest.mark.parametrize(
  ('given', 'problem'),
  [
    (
      {'JAX_PLATFORMS': 'tpu'},
      'JAX_PLATFORMS=tpu: a learner exchanges through the CPU client too; make '
      'it JAX_PLATFORMS=tpu,cpu',
    ),
    (
      {'JAX_PLATFORMS': 'cpu,cuda'},
      'JAX_PLATFORMS=cpu,cuda: a learner trains on the first, the CPU; make it '
      'JAX_PLATFORMS=cuda,cpu, or JAX_PLATFORMS=cpu',
    ),
    (
      {'MEGASCALE_NUM_SLICES': '2'},
      'MEGASCALE_NUM_SLICES: joins slices to one JAX world, and a learner is '
      'one by itself, of one slice: unset it, and start a learner for each '
      'slice',
    ),
    (
      {'XLA_PYTHON_CLIENT_MEM_FRACTION': '40'},
      'XLA_PYTHON_CLIENT_MEM_FRACTION=40: must be a share of a GPU, above 0 '
      'and at most 1',
    ),
    (
      {'XLA_CLIENT_MEM_FRACTION': 'half'},
      'XLA_CLIENT_MEM_FRACTION=half: must be a share of a GPU, above 0 and at '
      'most 1',
    ),
    (
      {'XLA_PYTHON_CLIENT_PREALLOCATE': 'no'},
      'XLA_PYTHON_CLIENT_PREALLOCATE=no: must be one of true, false, 1, 0',
    ),
  ],
)
def test_it_can_not_train_with(given, problem):
  with pytest.raises(ConfigError) as caught:
    hardware.check(given)
  assert caught.value.problems == (problem,)


def test_all_that_is_wrong_is_listed():
  given = {'JAX_PLATFORMS': 'tpu', 'MEGASCALE_B': '1', 'MEGASCALE_A': '1'}
  with pytest.raises(ConfigError) as caught:
    hardware.check(given)
  names = [each.partition(':')[0] for each in caught.value.problems]
  assert names == ['JAX_PLATFORMS=tpu', 'MEGASCALE_A', 'MEGASCALE_B']
