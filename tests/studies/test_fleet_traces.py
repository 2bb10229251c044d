# SPDX-License-Identifier: Apache-2.0
"""All systems on a fleet share its failures, as far as each of them runs."""

import pytest

from diloco.config import simulation
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
  return goodput.fault_events(config, row, 1_200_000, 3, until_s)


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
    events = goodput.fault_events(config, row, 2_400_000, seed, 10.0)
    standing += any(stop.begin_s == 0 for stop in events.suspensions[0])
  assert abs(standing - 59.4) < 4 * 4.9


def test_stops_and_capacities_are_within_the_run():
  events = _standing(_config(), 4)
  for m in range(4):
    assert all(0 <= stop.begin_s < 600 for stop in events.suspensions[m])
    shares = events.capacities[m]
    assert all(at_s >= 0 and 0 < share <= 1 for at_s, share in shares)


def test_of_a_learner_a_slice_is_missed():
  """256 chips of 300,000."""
  shares = {share for _, share in _standing(_config(), 4).capacities[0]}
  assert 1 - 256 / 300_000 in shares


def test_who_waits_misses_no_slice():
  events = _standing(_config(), 4, recovery='wait')
  for m in range(4):
    assert events.suspensions[m] and not events.capacities[m]


def test_learners_that_restart_die_where_elastic_ones_are_suspended():
  elastic = _standing(_config(), 4)
  restart = _standing(_config(), 4, recovery='restart')
  assert elastic.deaths == () and restart.suspensions == {}
  assert [(d.at_s, d.back_at_s) for d in restart.deaths if d.process == 2] == [
    (stop.begin_s, stop.end_s) for stop in elastic.suspensions[2]
  ]
