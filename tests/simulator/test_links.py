# SPDX-License-Identifier: Apache-2.0
"""Bytes queue on links, and are counted."""

import pytest

from diloco.simulator.network import SYNCER, Cargo, Links, Meter
from tests.fleets.fleets import network_of


def test_a_pull_takes_latency_both_ways_and_its_bits():
  links = Links(network_of(learner_bps=1e6, latency_s=0.1), window_s=1.0)
  assert links.arrival_s(5.0, 0, SYNCER, Cargo.OFFER, 0) == 5.0 + 0.2 + 1.0
  assert links.arrival_s(5.0, SYNCER, 0, Cargo.UPDATE, 0) == 5.0 + 0.2 + 2.0


def test_the_two_ways_of_a_link_do_not_share_it():
  links = Links(network_of(learner_bps=1e6), window_s=1.0)
  assert links.arrival_s(0.0, 0, SYNCER, Cargo.OFFER, 0) == 1.0
  assert links.arrival_s(0.0, SYNCER, 0, Cargo.UPDATE, 0) == 2.0


def test_learners_queue_at_the_syncer():
  links = Links(network_of(learner_bps=1e6, syncer_bps=2e6), window_s=1.0)
  ends = [links.arrival_s(0.0, m, SYNCER, Cargo.OFFER, 0) for m in range(4)]
  # Each link alone takes 1 s; the syncer's takes four of them in 2 s.
  assert ends == [1.0, 1.0, 1.5, 2.0]


def test_what_stays_in_a_data_centre_costs_nothing():
  links = Links(network_of(learner_bps=1e6, datacentres=2), window_s=1.0)
  near = links.arrival_s(0.0, 1, SYNCER, Cargo.OFFER, 3)
  far = links.arrival_s(0.0, 1, SYNCER, Cargo.OFFER, 2)
  assert (near, far) == (0.0, 1.0)


def test_a_state_goes_from_peer_to_peer():
  links = Links(network_of(learner_bps=96e6), window_s=1.0)
  pieces, now_s = links.pieces(Cargo.STATE), 0.0
  assert pieces == 96  # Of 1 Mbit, as an offer.
  for _ in range(pieces):
    now_s = links.arrival_s(now_s, 3, 5, Cargo.STATE, 0)
  assert now_s == pytest.approx(1.0)
  used = links.meters()
  assert set(used) == {(3, 'out'), (5, 'in')}
  assert used[3, 'out'].bits == pytest.approx(96e6)


def test_a_meter_spreads_bits_over_the_time_that_they_took():
  meter = Meter(window_s=1.0)
  meter.add(0.5, 2.5, 200.0)
  meter.add(2.0, 2.0, 30.0)
  assert meter.bits == 230.0
  assert meter.peak_bps == pytest.approx(100.0)  # Between 1 and 2 s.
  meter.add(2.1, 2.2, 40.0)
  assert meter.peak_bps == pytest.approx(50.0 + 30.0 + 40.0)


def test_what_still_queues_has_not_been_sent():
  meter = Meter(window_s=1.0)
  meter.add(0.5, 2.5, 200.0)
  assert meter.bits_until(1.0) == pytest.approx(50.0)
  assert meter.bits_until(1.5) == pytest.approx(100.0)
  assert meter.bits_until(9.0) == pytest.approx(200.0)
