# SPDX-License-Identifier: Apache-2.0
"""The table of slices, by what the makers say, and what does not fit one."""

import pytest

from diloco.config import hardware
from diloco.config.sections import ConfigError


@pytest.mark.parametrize(
  ('name', 'chip', 'chips', 'hosts'),
  [
    ('v5litepod-8', 'v5e', 8, 1),
    ('v5litepod-256', 'v5e', 256, 64),
    ('v5p-8', 'v5p', 4, 1),  # TensorCores.
    ('v5p-256', 'v5p', 128, 32),
    ('v6e-16', 'v6e', 16, 4),
  ],
)
def test_a_slice_has_its_chips(name, chip, chips, hosts):
  found = hardware.topology(name)
  assert (found.chip.name, found.chips, found.hosts) == (chip, chips, hosts)


def test_v5e_goes_by_both_names():
  assert hardware.topology('v5e-256') is hardware.topology('v5litepod-256')


def test_an_unknown_one_names_the_nearest():
  with pytest.raises(ConfigError) as caught:
    hardware.topology('v5p-255')
  (problem,) = caught.value.problems
  assert problem.startswith('--topology=v5p-255: unknown; did you mean v5p-25')


def test_a_mesh_that_leaves_chips_names_what_it_fits():
  chosen = hardware.topology('v5p-256')
  hardware.check_fits(chosen, 128, 'mesh.fsdp=128')
  with pytest.raises(ConfigError) as caught:
    hardware.check_fits(chosen, 32, 'mesh.fsdp=32')
  assert caught.value.problems == (
    '--topology=v5p-256: has 128 chips, the mesh mesh.fsdp=32 takes 32: it '
    'fits v5litepod-32, v5p-64; or make the product of the mesh 128',
  )


def test_a_chip_by_what_jax_calls_it():
  assert hardware.chip_of('TPU v5 lite') is hardware.V5E
  assert hardware.chip_of('cpu') is None
