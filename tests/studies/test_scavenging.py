# SPDX-License-Identifier: Apache-2.0
"""Learners that come for half of the work: times, bootstraps, departures."""

import pytest

from diloco.config import simulation
from diloco.studies import scavenging
from experiments import scavenging as experiment


def report_of(gbps=100.0, said=None, **study):
  config = experiment.get_config()
  config.study.update(seeds=1, **study)
  config.network.learner_gbps = gbps
  say = (said if said is not None else []).append
  return scavenging.report(simulation.build(config), say)


def rows_of(report, part=0):
  table = report.parts[part]
  names = [column.name for column in table.columns]
  return {row[0]: dict(zip(names, row)) for row in table.rows}


@pytest.fixture(scope='module')
def report():
  return report_of(steps=240, extra=(1, 12))


def test_times_are_ideal_within_two_points(report):
  for row in rows_of(report).values():
    assert row['relative time'] == pytest.approx(row['closed form'], abs=0.02)
    if row['paper'] is not None:
      assert row['relative time'] == pytest.approx(row['paper'], abs=0.02)


def test_nobody_coming_is_always_a_row(report):
  rows = rows_of(report)
  assert list(rows) == [0, 25, 300]
  assert rows[0]['relative time'] == 1.0
  assert rows[0]['bootstrap s'] is None


def test_who_comes_bootstraps_through_a_peer_and_is_merged(report):
  row = rows_of(report)[300]
  assert row['from a peer'] == 12
  # 24 GB at 100 Gbit/s take 1.9 s; three ask the same donor at once.
  assert 2.0 < row['bootstrap s'] < 10.0
  assert row['extra tokens %'] == pytest.approx(37.5, abs=2)
  assert row['extra merged %'] > 70


def test_a_slow_link_costs_time_but_stops_nobody():
  slow = rows_of(report_of(gbps=2.0, steps=100, extra=(4,)))[100]
  assert 0.77 < slow['relative time'] <= 1.01
  assert slow['closed form'] == 0.75


def test_who_comes_costs_little_more_than_its_own_wait():
  """The slow link also carries the fragments, which none may wait for."""
  report = report_of(steps=60, extra=(0,), copy_steps=(1, 24))
  for copy, row in rows_of(report, part=2).items():
    alone = row['of the newcomer alone']
    assert alone == pytest.approx(copy / 5)
    assert alone <= row['cost, steps'] < 1.6 * alone
    assert row['data-parallel'] == copy
