# SPDX-License-Identifier: Apache-2.0
"""Θ and moments go from learner to learner, whatever their hosts and meshes."""

import pytest

from tests.learner.groups import printed_by, world

pytestmark = pytest.mark.beside


@pytest.fixture(scope='module')
def found():
  """Returns what each of the four processes prints."""
  return printed_by(world('tests.learner.host_states', processes=4, devices=1))


def test_moments_come_back_to_the_bit(found):
  """From 4 hosts to 1, 2, 3 and 4, over fsdp and tensor meshes."""
  for host in found:
    assert host['same'] and host['unlike_fresh']


def test_theta_comes_with_them(found):
  for host in found:
    assert host['theta']
    assert set(host['versions']) == {7}


def test_a_host_pulls_what_it_needs_and_no_more(found):
  """What lies whole on every device, such as a norm, is little."""
  whole = found[0]['pulled']['4 hosts to 1 host'][0]
  for host in found[:2]:
    assert 0.5 * whole < host['pulled']['1 host to 2 hosts'][0] < 0.55 * whole
  for host in found[:3]:
    assert 0.33 * whole < host['pulled']['2 hosts to 3 hosts'][0] < 0.4 * whole


def test_a_state_that_is_not_whole_is_refused(found):
  for host in found:
    for link, (nbytes, refusal) in host['pulled'].items():
      assert not nbytes or 'bytes of inner state are offered' in refusal, link
