# SPDX-License-Identifier: Apache-2.0
"""The link: worked by hand, against a public simulator, and in closed form."""

import random

import pytest

from diloco.fleets import traffic
from diloco.fleets.traffic import fragment_shares
from tests.fleets import fifo_link
from tests.fleets.fifo_link import TOLERANCE, bandwidth_gbps

STEPS = 2000
UTILISATIONS = (0.5, 0.75, 0.9, 0.95, 0.99)
MODEL_GBIT = 5e9 * 16 / 1e9  # 5 B parameters in bf16.
H, TAU, BUCKETS = 24, 2, 128

# What the public simulator that `fifo_link` names prints for T = 1 s: Gbit/s
# for 50, 75, 90, 95, 99 % utilisation.
TABLE = {
  ('data-parallel', 2, 16): (48, 81, 104, 111, 122),
  ('data-parallel', 8, 16): (84, 140, 180, 195, 208),
  ('diloco', 2, 16): (3.2, 8.9, 23, 43, 98),
  ('streaming', 2, 16): (1.7, 2.5, 3.0, 3.2, 3.3),
  ('streaming', 2, 4): (0.42, 0.62, 0.74, 0.79, 0.82),
  ('streaming', 8, 16): (2.9, 4.4, 5.2, 5.5, 5.8),
  ('streaming', 8, 4): (0.73, 1.1, 1.3, 1.4, 1.4),
}


def _method(kind, gbit, step_s, share=0.0):
  """Cycle and closed form of one method that puts `gbit` on the link."""
  if kind == 'data-parallel':
    return (
      fifo_link.data_parallel(gbit, step_s, BUCKETS),
      traffic.Bursts(gbit, step_s, BUCKETS),
    )
  if kind == 'diloco':
    return (
      fifo_link.diloco(gbit, step_s, BUCKETS, H),
      traffic.Bursts(gbit, step_s, BUCKETS, H),
    )
  sizes = [gbit * each for each in fragment_shares(H, share)]
  return (
    fifo_link.streaming(sizes, step_s, H, TAU),
    traffic.Stream(sizes[0], sizes[1], H, step_s, H, TAU),
  )


def _simulated_gbps(cycle, step_s, utilisation):
  return bandwidth_gbps(
    lambda gbps: fifo_link.utilisation(cycle, step_s, gbps, STEPS), utilisation
  )


# By hand ---------------------------------------------------------------------


def test_two_buckets_by_hand():
  # T = 3: buckets of 1 Gbit are there at 2 and 3, each takes 2 s at 0.5 Gbit/s:
  # 2 … 4 and 4 … 6. The step ends at 6 in place of 3.
  cycle = fifo_link.data_parallel(2.0, 3.0, buckets=2)
  assert cycle[0].releases == ((2.0, 1.0), (3.0, 1.0))
  assert fifo_link.utilisation(cycle, 3.0, 0.5, steps=7) == 0.5


def test_a_fast_link_waits_for_the_last_bucket():
  # At 4 Gbit/s: 2 … 2.25 and 3 … 3.25, a quarter of a second too late.
  cycle = fifo_link.data_parallel(2.0, 3.0, buckets=2)
  assert fifo_link.utilisation(cycle, 3.0, 4.0, steps=5) == 3.0 / 3.25


def test_a_sync_of_diloco_by_hand():
  # Every third step of 3 s takes 6: 9 of 12 s. Of 4 steps one is a sync.
  cycle = fifo_link.diloco(2.0, 3.0, buckets=2, every=3)
  assert fifo_link.utilisation(cycle, 3.0, 0.5, steps=9) == 9 / 12
  assert fifo_link.utilisation(cycle, 3.0, 0.5, steps=4) == 12 / 15


def test_fragments_queue_until_the_deadline_by_hand():
  # T = 1, τ = 1: 1.5 s each, due after 2. First: through at 1.5. Second: waits
  # half a second, through after 2, just in time. From the third on each is
  # half a second late, and the next finds the link busy for one more second.
  cycle = fifo_link.streaming((1.5,), 1.0, every=1, overlap=1)
  assert fifo_link.utilisation(cycle, 1.0, 1.0, steps=2) == 1.0
  assert fifo_link.utilisation(cycle, 1.0, 1.0, steps=3) == 3 / 3.5
  assert fifo_link.utilisation(cycle, 1.0, 1.0, steps=1000) == 1000 / 1499


def test_a_large_fragment_delays_small_ones_by_hand():
  # T = 1, τ = 1: 4 s, then three of 0.25 s. The large one is 2 s late, and
  # busies the link for one more second, in which a small one waits.
  cycle = fifo_link.streaming((4.0, 0.25, 0.25, 0.25), 1.0, 4, overlap=1)
  assert fifo_link.utilisation(cycle, 1.0, 1.0, steps=400) == 400 / 600


def test_fragments_must_divide_the_interval():
  with pytest.raises(ValueError, match='P=5 fragments do not divide H=24'):
    fifo_link.streaming((1.0,) * 5, 1.0, 24, 2)


def test_cycles_that_are_left_out_change_nothing():
  sizes = [80 * each for each in fragment_shares(H, 0.23)]
  cycle = fifo_link.streaming(sizes, 1.0, H, TAU)
  unrolled = cycle * (STEPS // H) + cycle[: STEPS % H]
  for gbps in (1.0, 3.0, 3.4, 6.0, 20.0):
    assert fifo_link.utilisation(cycle, 1.0, gbps, STEPS) == pytest.approx(
      fifo_link.utilisation(unrolled, 1.0, gbps, STEPS), rel=1e-12
    )


# The table -------------------------------------------------------------------


@pytest.mark.parametrize(('kind', 'datacentres', 'bits'), TABLE)
def test_the_table_is_met(kind, datacentres, bits):
  share = traffic.all_reduce_share(datacentres)
  cycle, _ = _method(kind, MODEL_GBIT * share * bits / 16, 1.0)
  found = [_simulated_gbps(cycle, 1.0, u) for u in UTILISATIONS]
  assert found == pytest.approx(TABLE[kind, datacentres, bits], rel=0.05)


@pytest.mark.parametrize(('bits', 'published'), [(16, 1.7), (4, 0.43)])
def test_decoupled_is_met_at_the_stated_assumption(bits, published):
  # 90 %, D = 2, per direction, an unsplit embedding of 23 %. It decides alone:
  # g = 0.23 · 40 Gbit, L = 3 s, W = 24/0.9 − 24 = 2.67 s, g/(L + W) = 1.62,
  # 4.5 % below 1.7; a quarter of it is 5.6 % below 0.43.
  share = traffic.one_way_share(2)
  cycle, form = _method(
    'streaming', MODEL_GBIT * share * bits / 16, 1.0, share=0.23
  )
  assert _simulated_gbps(cycle, 1.0, 0.9) == pytest.approx(published, rel=0.05)
  assert form.gbps(0.9) == pytest.approx(0.23 * 2.5 * bits / (17 / 3))


# Closed forms ----------------------------------------------------------------


@pytest.mark.parametrize('kind', ['data-parallel', 'diloco', 'streaming'])
@pytest.mark.parametrize('datacentres', [3, 16, 64])
@pytest.mark.parametrize('step_s', [0.1, 1.0, 5.0])
def test_other_steps_and_data_centres_follow_the_closed_form(
  kind, datacentres, step_s
):
  share = traffic.all_reduce_share(datacentres)
  cycle, form = _method(kind, MODEL_GBIT * share, step_s)
  for utilisation in UTILISATIONS:
    gbps = form.gbps(utilisation)
    found = fifo_link.utilisation(cycle, step_s, gbps, STEPS)
    assert found == pytest.approx(utilisation, abs=0.004)
    bisected = _simulated_gbps(cycle, step_s, utilisation)
    assert form.utilisation(bisected) == pytest.approx(
      utilisation, abs=TOLERANCE + 0.004
    )


@pytest.mark.parametrize('kind', ['data-parallel', 'diloco', 'streaming'])
def test_one_data_centre_needs_nothing(kind):
  cycle, form = _method(kind, MODEL_GBIT * traffic.all_reduce_share(1), 1)
  assert _simulated_gbps(cycle, 1.0, 0.99) == 0.0
  assert form.gbps(0.99) == 0.0
  assert form.utilisation(1e-3) >= 0.99


def test_a_fleet_without_data_centres_is_refused():
  with pytest.raises(ValueError, match='datacentres=0: must be at least 1'):
    traffic.all_reduce_share(0)


def test_streams_of_any_shape_follow_the_closed_form():
  rng = random.Random(0)
  for _ in range(300):
    fragments, spacing = rng.choice([1, 2, 3, 8]), rng.choice([1, 2, 5])
    every, overlap = fragments * spacing, rng.randrange(5)
    step_s = rng.uniform(0.1, 5.0)
    first, other = rng.uniform(0.1, 10.0), rng.uniform(0.1, 10.0)
    sizes = (first, *(other,) * (fragments - 1))
    gbps = rng.uniform(0.2, 5.0) * sum(sizes) / (every * step_s)
    form = traffic.Stream(first, other, fragments, step_s, every, overlap)
    steps = 200 * every
    cycle = fifo_link.streaming(sizes, step_s, every, overlap)
    found = fifo_link.utilisation(cycle, step_s, gbps, steps)
    # The first fragments find an empty link: at most τ + 1 steps are gained.
    assert 1 / found == pytest.approx(
      1 / form.utilisation(gbps), abs=(overlap + 1) / steps
    )
    for utilisation in UTILISATIONS:
      needed = form.gbps(utilisation)
      assert form.utilisation(needed) == pytest.approx(utilisation)


# Bisection -------------------------------------------------------------------


def test_bisection_stops_within_its_tolerance():
  found = bandwidth_gbps(lambda gbps: gbps / (gbps + 7), 0.3, tolerance=1e-6)
  assert found == pytest.approx(3.0, rel=1e-5)


@pytest.mark.parametrize('scale', [1e-7, 1e9])
def test_bisection_goes_beyond_its_bounds(scale):
  found = bandwidth_gbps(lambda gbps: gbps / (gbps + scale), 0.5)
  assert found == pytest.approx(scale, rel=0.03)


def test_bisection_refuses_what_is_no_share():
  with pytest.raises(ValueError, match=r'utilisation=1.0: must be in \(0, 1\)'):
    bandwidth_gbps(lambda gbps: 0.5, 1.0)


def test_bisection_says_that_nothing_is_enough():
  with pytest.raises(ArithmeticError, match='no bandwidth'):
    bandwidth_gbps(lambda gbps: 0.5, 0.9)


def test_fragments_hold_the_whole_model():
  shares = traffic.fragment_shares(24, 0.23)
  assert shares[0] == 0.23 and len(shares) == 24
  assert sum(shares) == pytest.approx(1.0)
  assert traffic.fragment_shares(4, 0.0) == (0.25,) * 4
