# SPDX-License-Identifier: Apache-2.0
"""The inner state of a learner of two hosts goes from host to host."""

import pytest

from tests.learner.groups import printed_by_two

pytestmark = pytest.mark.beside


@pytest.fixture(scope='module')
def found():
  """Returns what each of the two processes prints."""
  return printed_by_two('tests.learner.host_states')


def test_moments_come_back_to_the_bit(found):
  for host in found:
    assert host['same'] and host['unlike_fresh']


def test_the_next_step_is_that_of_the_donor(found):
  assert all(host['same_step'] for host in found)


def test_theta_comes_with_them(found):
  for host in found:
    assert host['theta']
    assert set(host['versions']) == {7}


def test_each_host_gives_its_own_part_in_chunks(found):
  for host in found:
    assert host['chunks'] == -(-host['bytes'] // 10_000) > 1
    assert host['bytes'] < 0.6 * host['whole_bytes']


def test_a_state_that_is_not_whole_is_refused(found):
  assert all('bytes of inner state are offered' in x['refused'] for x in found)
