# SPDX-License-Identifier: Apache-2.0
"""Checks how many hosts each learner has, and how they share its devices."""

import pytest

from diloco.config.sections import ConfigError
from launch.program import Processes, host_flags, hosts_of_all, on_this_machine
from tests.backends.launch_values import a_config


def _forced(count):
  return (('XLA_FLAGS', f'--xla_force_host_platform_device_count={count}'),)


def test_two_processes_beside_one():
  assert on_this_machine(a_config(4), '2,1', True, '') == (
    Processes(2, _forced(2)),
    Processes(1, _forced(4)),
  )


def test_one_number_is_for_all():
  assert on_this_machine(a_config(4, learners=3), '4', False, '') == (
    (Processes(4),) * 3
  )


def test_other_flags_of_xla_are_kept():
  (each,) = on_this_machine(a_config(4, learners=1), '1', True, '--xla_a=b')
  assert each.environment == (
    ('XLA_FLAGS', '--xla_a=b --xla_force_host_platform_device_count=4'),
  )


@pytest.mark.parametrize(
  'asked, words',
  [
    ('', '--hosts=: must be a number from 1'),
    ('0', '--hosts=0: must be a number from 1'),
    ('-1', '--hosts=-1: must be a number from 1'),
    ('2,', '--hosts=2,: must be a number from 1'),
    ('2,1,1', '--hosts=2,1,1: has 3 numbers, and there are 2 learners'),
    ('1,3', 'the 3 of learner 1 do not share the devices of config.mesh'),
  ],
)
def test_refused(asked, words):
  with pytest.raises(ConfigError, match=words):
    on_this_machine(a_config(4), asked, False, '')


def test_elsewhere_all_have_equally_many():
  assert hosts_of_all('3') == 3
  with pytest.raises(ConfigError, match='2,1: one number for all'):
    hosts_of_all('2,1')


def test_what_a_host_is_told():
  assert host_flags(1, 0, 'here') == []
  assert host_flags(2, 1, 'there:7') == [
    '--hosts=2', '--host=1', '--coordinator=there:7',
  ]  # fmt: skip
