# SPDX-License-Identifier: Apache-2.0
"""All systems on a fleet share its failures, as far as each of them runs."""

import pytest

from diloco.config import simulation
from diloco.fleets.systems import RECOVERIES
from diloco.studies import goodput
from diloco.studies.goodput import Row
from experiments import goodput as experiments_goodput

PAUSE_S = 13.7


def _config(**changes):
  config = experiments_goodput.get_config()
  config.failures.update(changes)
  return simulation.build(config.lock())


def _standing(config, learners, recovery='elastic', until_s=600.0):
  row = Row('', learners, recovery)
  return goodput.standing(config, row, 1_200_000, 3, until_s)


def test_a_longer_run_begins_with_the_same_failures():
  config = _config()
  short, long = (
    goodput.drawn(config.failures, 600_000, 1, until_s)
    for until_s in (600.0, 6000.0)
  )
  assert long[: len(short)] == short
  assert len(long) > len(short)


@pytest.mark.parametrize('change', [{'seed': 2}, {'chips': 150_000}])
def test_another_seed_or_fleet_has_other_failures(change):
  config = _config()
  asked = {'chips': 600_000, 'seed': 1, 'until_s': 600.0}
  one = goodput.drawn(config.failures, **asked)
  assert one != goodput.drawn(config.failures, **(asked | change))


def test_a_fleet_has_been_at_it_when_the_run_begins():
  """59.4 % of the fleets of 2.4 M chips stand then, by the closed form."""
  config, row = _config(), Row('', 1, 'elastic')
  standing = 0
  for seed in range(100):
    (one,) = goodput.standing(config, row, 2_400_000, seed, 10.0)
    standing += bool(one.stops) and one.stops[0].begin_s == 0
  assert abs(standing - 59.4) < 4 * 4.9


def test_stops_and_capacities_are_within_the_run():
  for one in _standing(_config(), 4):
    assert all(0 <= stop.begin_s < 600 for stop in one.stops)
    assert all(at_s >= 0 and 0 < share <= 1 for at_s, share in one.capacities)


def test_of_a_learner_a_slice_is_missed():
  """256 chips of 300,000."""
  shares = {share for _, share in _standing(_config(), 4)[0].capacities}
  assert 1 - 256 / 300_000 in shares


def test_who_waits_misses_no_slice():
  for one in _standing(_config(), 4, recovery='wait'):
    assert one.stops and not one.capacities


def test_elastic_learners_are_suspended():
  config = _config()
  every = _standing(config, 4)
  befalls = goodput.fault_events(every, RECOVERIES['elastic'])
  assert befalls.suspensions[2] == every[2].stops
  assert befalls.deaths == ()


def test_learners_that_restart_die():
  config = _config()
  every = _standing(config, 4)
  befalls = goodput.fault_events(every, RECOVERIES['restart'])
  assert befalls.suspensions == {}
  assert [(d.at_s, d.back_at_s) for d in befalls.deaths if d.process == 2] == [
    (stop.begin_s, stop.end_s) for stop in every[2].stops
  ]
