# SPDX-License-Identifier: Apache-2.0
"""Closed forms of one link against its simulation, and the paper's figures.

Traffic is periodic: a cycle is its steps, each with what it puts on the link,
first in first out, (seconds after its start, Gbit), and when that is due.
"""

import itertools
import math
import random

import pytest

from diloco.fleets import traffic
from diloco.fleets.traffic import Bursts, Stream, fragment_shares

UTILISATIONS = (0.5, 0.75, 0.9, 0.95, 0.99)
MODEL_GBIT = 5e9 * 16 / 1e9  # 5 B parameters in bf16.


def simulate(cycle, step_s, gbps, cycles):
  """Returns ΣT / (ΣT + Σstall); a step is stretched by what comes too late."""
  busy_s = stall_s = 0.0
  for releases, due_s in itertools.chain(*[cycle] * cycles):
    for release_s, gbit in releases:
      busy_s = max(busy_s, release_s) + gbit / gbps
    stall_s += max(0.0, busy_s - due_s)
    # A stall ends when the link is free: the next step finds the rest of it.
    busy_s = max(0.0, min(busy_s, due_s) - step_s)
  all_s = cycles * len(cycle) * step_s
  return all_s / (all_s + stall_s)


def bursts(form):
  """Bucket k of K is ready at T/3 + (k+1)/K · 2T/3; all are due at the end."""
  share, t = form.gbit / form.buckets, form.step_s
  releases = [
    (t / 3 + (k + 1) / form.buckets * 2 * t / 3, share)
    for k in range(form.buckets)
  ]
  return [((), math.inf)] * (form.every - 1) + [(releases, t)]


def stream(form):
  sizes = (form.first_gbit, *[form.other_gbit] * (form.fragments - 1))
  idle = [((), math.inf)] * (form.every // form.fragments - 1)
  due_s = (form.overlap + 1) * form.step_s
  return [step for gbit in sizes for step in ([((0.0, gbit),), due_s], *idle)]


def test_two_buckets_by_hand():
  # T = 3: buckets of 1 Gbit are there at 2 and 3, each takes 2 s at 0.5 Gbit/s:
  # 2 … 4 and 4 … 6. The step ends at 6 in place of 3. At 4 Gbit/s: 2 … 2.25 and
  # 3 … 3.25, a quarter of a second too late.
  form = Bursts(2.0, 3.0, buckets=2)
  for gbps, expected in ((0.5, 0.5), (4.0, 3.0 / 3.25)):
    assert simulate(bursts(form), 3.0, gbps, 7) == expected
    assert form.utilisation(gbps) == pytest.approx(expected)


def test_a_large_fragment_delays_small_ones_by_hand():
  # T = 1, τ = 1: 4 s, then three of 0.25 s. The large one is 2 s late, and
  # busies the link for one more second, in which a small one waits.
  form = Stream(4.0, 0.25, 4, 1.0, 4, overlap=1)
  assert simulate(stream(form), 1.0, 1.0, 100) == 400 / 600
  assert form.utilisation(1.0) == 4 / 6


@pytest.mark.parametrize('every', [1, 24])
@pytest.mark.parametrize('datacentres', [2, 64])
@pytest.mark.parametrize('step_s', [0.1, 5.0])
def test_bursts_follow_their_form(every, datacentres, step_s):
  gbit = MODEL_GBIT * traffic.all_reduce_share(datacentres)
  form = Bursts(gbit, step_s, 128, every)
  for utilisation in UTILISATIONS:
    gbps = form.gbps(utilisation)
    assert form.utilisation(gbps) == pytest.approx(utilisation)
    found = simulate(bursts(form), step_s, gbps, 4)
    assert found == pytest.approx(utilisation, abs=0.004)


def test_streams_of_any_shape_follow_their_form():
  rng = random.Random(0)
  for _ in range(100):
    fragments, spacing = rng.choice([1, 2, 3, 8]), rng.choice([1, 2, 5])
    every, overlap = fragments * spacing, rng.randrange(5)
    step_s = rng.uniform(0.1, 5.0)
    first, other = rng.uniform(0.1, 10.0), rng.uniform(0.1, 10.0)
    form = Stream(first, other, fragments, step_s, every, overlap)
    gbit = first + other * (fragments - 1)
    gbps = rng.uniform(0.2, 5.0) * gbit / (every * step_s)
    found = simulate(stream(form), step_s, gbps, 100)
    # The first fragments find an empty link: at most τ + 1 steps are gained.
    assert 1 / found == pytest.approx(
      1 / form.utilisation(gbps), abs=(overlap + 1) / (100 * every)
    )
    for utilisation in UTILISATIONS:
      needed = form.gbps(utilisation)
      assert form.utilisation(needed) == pytest.approx(utilisation)


def test_fragments_hold_the_whole_model():
  shares = fragment_shares(24, 0.23)
  assert shares[0] == 0.23 and len(shares) == 24
  assert sum(shares) == pytest.approx(1.0)
  assert fragment_shares(4, 0.0) == (0.25,) * 4
