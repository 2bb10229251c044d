# SPDX-License-Identifier: Apache-2.0
"""The soak: its plan, what it measures, and a run of it."""

import json
import math
import os

import pytest

from tests.chaos import resources, soak_run
from tests.chaos.resources import Sample
from tests.commands import python

pytestmark = pytest.mark.beside

ROLES = ('syncer', 'learner-0', 'learner-1', 'learner-2')
KILLS = 100
SEED = 0


def test_a_plan_has_as_many_kills_as_it_should_and_is_of_its_seed():
  planned = soak_run.plan(KILLS, SEED, ROLES)
  assert sum(len(strike.victims) for strike in planned) == KILLS
  assert planned == soak_run.plan(KILLS, SEED, ROLES)
  assert planned != soak_run.plan(KILLS, SEED + 1, ROLES)


def test_a_plan_has_pairs_start_ups_and_every_role():
  planned = soak_run.plan(KILLS, SEED, ROLES)
  assert {len(strike.victims) for strike in planned} == {1, 2}
  assert {strike.in_start_up for strike in planned} == {False, True}
  assert {name for strike in planned for name in strike.victims} == set(ROLES)
  assert not planned[0].in_start_up


def samples(seconds, rss_bytes):
  return [
    Sample(float(t), rss_bytes(t), 20.0, {'python': 9}) for t in range(seconds)
  ]


def test_a_warm_up_is_no_growth_and_a_leak_beside_it_is():
  def warms_up(t):
    return 4e8 + 25e6 * (1 - math.exp(-t / 15))

  found = resources.growth('a', 7, samples(60, warms_up))
  assert found.rss_bytes < resources.RSS_BYTES_MAX / 2
  leak = 2 * resources.RSS_BYTES_MAX / 60
  found = resources.growth(
    'a', 7, samples(60, lambda t: warms_up(t) + leak * t)
  )
  assert found.rss_bytes > resources.RSS_BYTES_MAX


def with_threads(counts):
  return [
    Sample(float(t), 1e8, 20.0, {'python': 9, 'pool': n})
    for t, n in enumerate(counts)
  ]


def test_a_pool_that_is_given_back_is_no_growth():
  breathing = with_threads([0] * 20 + [6] * 40 + [0] * 20 + [6] * 40)
  assert resources.growth('a', 7, breathing).threads == 0.0
  assert resources.growth('a', 7, breathing[:70]).threads is None


def test_threads_that_stay_are_growth():
  leak = resources.growth('a', 7, with_threads([t // 10 for t in range(121)]))
  assert leak.threads == pytest.approx(6.0)
  assert leak.new_threads == '+12 pool'


def test_a_sample_is_taken_only_while_all_are_at_work(monkeypatch):
  monkeypatch.setattr(resources, 'SAMPLE_EVERY_S', 0.0)
  monkeypatch.setattr(resources, 'WARM_UP_S', 0.0)
  watched = resources.ResourceWatch(('hub', 'a'), hub='hub')
  mine = f'a ({os.getpid()})'

  def taken():
    watched.sample()
    return len(watched.samples()[mine])

  for name in ('hub', 'a'):
    watched.follow(name, os.getpid())
  watched.works('a')
  assert taken() == 0  # The hub is not.
  watched.works('hub')
  assert taken() == 1
  watched.dies('hub')  # And no process is connected any more.
  watched.works('hub')
  assert taken() == 1
  watched.follow('hub', os.getpid())
  for name in ('hub', 'a'):
    watched.works(name)
  assert taken() == 2


def soak(tmp_path, *flags):
  out, workdir = tmp_path / 'found.json', tmp_path / 'run'
  words = '-m', 'tests.chaos.soak', f'--out={out}', f'--workdir={workdir}'
  return out, python(*words, *flags)


def test_a_mistake_ends_before_a_process_is_started(tmp_path):
  _, done = soak(tmp_path, '--config.run.step_flor_s=1.0')
  assert done.returncode == 78
  assert 'did you mean run.step_floor_s?' in done.stderr


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_run_survives_a_hundred_kills(tmp_path):
  """Issue: any process, at any moment, a hundred times in one run."""
  out, done = soak(tmp_path, f'--kills={KILLS}', f'--seed={SEED}')
  assert done.returncode == 0, done.stdout + done.stderr
  found = json.loads(out.read_text())
  assert found['kills'] == KILLS
