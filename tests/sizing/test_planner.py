# SPDX-License-Identifier: Apache-2.0
"""A plan's arithmetic by hand, its reasons, its screen, its errors."""

import dataclasses
import math
import re
import subprocess
import sys

import pytest

from diloco.config.sections import ConfigError
from diloco.fleets import pauses, systems
from diloco.fleets.pauses import MeasuredPause
from diloco.sizing import planner
from diloco.sizing.planner import HostSpeeds, Situation

# bf16, P = H = 24: fragments of 1e7 values, 20 MB, 0.16 Gbit, 0.04 GB of f32.
SMALL = Situation(
  params=2.4e8,
  learners=2,
  bandwidth_gbps=1.0,
  step_s=1.0,
  codec='bf16',
  latency_s=0.02,
)
# 12 B parameters over 2 Gbit/s, as in the README's command.
LARGE = Situation(params=12e9, learners=4, bandwidth_gbps=2.0, step_s=1.3)


MEASURED = planner.host_speeds()


@pytest.fixture(autouse=True)
def speeds(monkeypatch):
  """Round ones; what was measured changes with the bench."""
  one = HostSpeeds('a machine', '2026', '', '', 0.0, 1.0, 1.1, 4.55, 0.36)
  monkeypatch.setattr(planner, 'host_speeds', lambda: one)


def _changed(situation=SMALL, **values):
  return planner.RunPlan(dataclasses.replace(situation, **values))


def _settings(found):
  config = found.protocol
  return config.fragments, config.sync_every_steps, config.overlap_steps


def test_times_by_hand():
  found = planner.RunPlan(SMALL)
  assert found.fragment_bytes == 2e7
  x = found.exchange
  assert (x.up_s, x.down_s) == (0.16, 0.16)
  assert x.latency_s == pytest.approx(0.12)  # Six of 20 ms.
  assert x.encode_s == pytest.approx(0.04 * 1.0)
  # A round takes 4.55, and 0.36 for each of two.
  assert x.merge_s == pytest.approx(0.04 * (4.55 + 0.72))
  assert x.take_in_s == pytest.approx(0.04 * 1.1)
  assert x.total_s == pytest.approx(0.7348)
  assert found.link_share == pytest.approx(0.16)
  assert found.links_on_time == found.hosts_on_time == 1.0


def test_an_exchange_within_a_step_takes_the_papers_settings():
  assert _settings(planner.RunPlan(SMALL)) == (24, 24, 2)
  assert planner.RunPlan(SMALL).protocol.quorum == 1


def test_grace_is_what_the_syncer_will_find():
  # τ·T less the exchange is 1.2652 s; 0.8 of it is more than the cap of a step.
  assert planner.RunPlan(SMALL).grace_s == 1.0
  # At T = 0.4: exchange 0.7348 s, 2 steps, so τ = 3; 0.8 · (1.2 - 0.7348).
  short = _changed(step_s=0.4)
  assert _settings(short)[2] == 3
  assert short.grace_s == pytest.approx(0.8 * (1.2 - 0.7348))


def test_overlap_is_the_exchange_and_one_step():
  # 6 · 0.3 + 0.16 + 0.16 + 0.2948 s of hosts = 2.41 s, 3 steps, and one more.
  assert _settings(_changed(latency_s=0.3))[2] == 4


def test_a_narrow_link_takes_a_longer_interval():
  # At H = 24 a fragment and two latencies take 1.64 s; at 48 0.84, at 36 1.11.
  found = _changed(bandwidth_gbps=0.1)
  assert _settings(found)[:2] == (48, 48)
  assert found.links_on_time == 1.0


def test_a_link_that_is_too_narrow_is_said_with_what_it_takes():
  # At H = 96 0.04 Gbit and 40 ms; 4 s at 0.01 Gbit/s: 1 of 4.04 rounds.
  found = _changed(bandwidth_gbps=0.01)
  assert found.protocol.sync_every_steps == 96
  assert found.links_on_time == pytest.approx(1 / 4.04)
  assert found.gbps_needed == pytest.approx(0.04 / 0.86)
  assert '0.047 Gbit/s would do' in '\n'.join(planner.lines(found))


def test_no_link_mends_latency():
  found = _changed(latency_s=1.0)
  assert found.gbps_needed == math.inf
  assert 'by latency alone' in '\n'.join(planner.lines(found))


def test_slow_hosts_are_named():
  found = planner.RunPlan(LARGE)  # 2 GB of f32 a fragment; 1.3 s a step.
  merge_s = 2 * (4.55 + 4 * 0.36)
  assert found.stages_s['merging at the syncer'] == pytest.approx(merge_s)
  assert found.hosts_on_time == pytest.approx(1.3 / merge_s)


def test_memory_by_hand():
  found = planner.RunPlan(SMALL)  # τ = 2: two rounds in flight.
  assert [m.nbytes for m in found.learner_memory] == [
    4 * 2.4e8,
    (16 + 3 * 2) * 1e7,
    12 * 2.4e8,
    20 * 2.4e8,
    24 * 2.4e8,
  ]
  assert [m.nbytes for m in found.syncer.memory[:4]] == [
    12 * 2.4e8,
    2 * 2 * 4 * 1e7,
    6 * 4 * 1e7,
    2 * 2 * 2 * 1e7 + 8 * 2 * 2.4e8,
  ]


def test_hosts_share_what_a_learner_does():
  one, four = planner.RunPlan(SMALL), _changed(hosts=4)
  assert four.exchange.encode_s == pytest.approx(one.exchange.encode_s / 4)
  assert four.exchange.take_in_s == pytest.approx(one.exchange.take_in_s / 4)
  assert four.exchange.merge_s == one.exchange.merge_s
  parts = [m.nbytes / 4 for m in one.learner_memory]
  assert [m.nbytes for m in four.learner_memory] == pytest.approx(parts)


def test_the_share_of_a_chip_by_hand():
  found = _changed(accelerator='v5litepod-8').chip  # Two rounds in flight.
  assert found.state == 12 * 2.4e8 / 8
  assert found.gradients == 4 * 2.4e8 / 8
  assert found.exchange == 2 * 2 * 4 * 1e7 / 8
  assert found.left == 16e9 - found.total
  small = _changed(params=2e11, accelerator='v6e-1')
  assert small.chip.left < 0
  assert 'IT DOES NOT FIT' in '\n'.join(planner.lines(small))


def test_failures_by_hand():
  # A chip a learner, one failure a day; a pause of 0.1 days, as long a repair.
  found = _changed(chips=2, mtbi_days=1.0, pause_s=8640.0, repair_s=8640.0)
  g = found.goodput['elastic']
  assert 1 - g == pytest.approx(0.1 * g * (1 + g))
  # 12 bytes of each of 2.4e8 parameters at 1 Gbit/s, and 2.75 steps of 1 s.
  again = (23.04 + 2.75) / 86_400
  assert found.goodput['wait'] == pytest.approx(1 / (1 + 0.2 + again))
  restart = g * math.exp(-(1 + g) * again)
  assert found.goodput['restart'] == pytest.approx(restart)
  assert found.failures_s == 43_200
  assert planner.RunPlan(SMALL).goodput == {}


def test_each_recovery_is_shown_and_which_a_launch_does():
  """Before, the only figure was that of a learner that is not built."""
  text = list(planner.lines(_changed(LARGE, chips=10_000)))
  (first,) = (i for i, x in enumerate(text) if x.startswith('goodput'))
  modes = [line[13:].split()[0] for line in text[first : first + 3]]
  assert modes == ['wait', 'restart', 'elastic']
  assert text[first].endswith('what a launch does')
  assert text[first + 2].endswith('takes several slices')


def test_a_learner_of_several_slices_goes_on_without_one():
  """g of the pauses, times what is left of three slices while one is away."""
  setup = {'chips': 6, 'mtbi_days': 1.0, 'pause_s': 864.0, 'repair_s': 8640.0}
  found = _changed(slices=3, **setup)
  g = systems.elastic_goodput(3 / 86_400, 864.0)
  there = 1 - 3 * g * 0.1 / 3
  assert found.goodput['elastic'] == pytest.approx(g * there)
  assert [*found.goodput] == ['elastic', 'wait', 'restart']
  text = '\n'.join(planner.lines(found))
  assert 'of a learner without 1 of 3' in text
  assert re.search('goodput +elastic .*: what a launch does', text)
  with pytest.raises(ConfigError, match=r'chips=5: .*learners=2 \* slices=3'):
    _changed(slices=3, chips=5)


def test_a_measured_pause_stands_beside_the_papers(monkeypatch):
  text = '\n'.join(planner.lines(_changed(chips=10_000)))
  assert "pause of the paper's fitted 13.7 s" in text
  entry = MeasuredPause(1e7, 3, 1, 'cold', 0.5, 1.5, 'CPU', '2026', 'abc')
  monkeypatch.setattr(pauses, 'measured', lambda: (entry,))
  plan = _changed(chips=10_000, slices=3)
  text = ' '.join('\n'.join(planner.lines(plan)).split())
  one = f'{100 * plan.goodput_with("elastic", 1.0):.4g} %'
  assert (
    f'elastic {one} with a pause of 1 s (measured here: 10 M, 3 slices of 1 '
    'host, CPU, cold)'
  ) in text
  assert plan.goodput_with('elastic', 1.0) > plan.goodput['elastic']


@pytest.mark.parametrize(
  'values',
  [
    {},
    {'chips': 2_400_000},
    {'params': 5e12, 'bandwidth_gbps': 0.1, 'chips': 10**7},
    {'params': 1.0, 'latency_s': 0.0},
    {'learners': 1000, 'step_s': 0.001, 'latency_s': 5.0, 'chips': 10**6},
    {'codec': 'f32', 'bandwidth_gbps': 1000.0},
    {
      'accelerator': 'v5litepod-256',
      'chips': 1024,
      'hosts': 64,
      'step_tokens': 2**20,
      'slices': 12,
    },
    {'params': 5e12, 'accelerator': 'v6e-1', 'chips': 4, 'step_tokens': 1},
  ],
)
def test_the_screen_fits(values, monkeypatch):
  long = MeasuredPause(
    1e9, 12, 64, 'cold', 1 / 3, 1.0, 'AMD EPYC 7B13, 240 cores', '2026', 'abc'
  )
  measured = long, dataclasses.replace(long, how='standby')
  monkeypatch.setattr(pauses, 'measured', lambda: measured)
  shown = list(planner.lines(_changed(LARGE, **values)))
  assert len(shown) <= (50 if 'accelerator' in values else 46)
  assert max(map(len, shown)) <= 80, max(shown, key=len)


@pytest.mark.parametrize(
  ('values', 'message'),
  [
    ({'params': 0.0}, '--params=0.0: must be finite, at least 1'),
    ({'learners': 0}, '--learners=0: must be at least 1'),
    ({'bandwidth_gbps': -1.0}, '--bandwidth_gbps=-1.0: must be finite and ab'),
    ({'step_s': math.nan}, '--step_s=nan: must be finite and above 0'),
    ({'chips': 1}, '--chips=1: must be at least learners=2'),
    ({'latency_s': math.inf}, '--latency_s=inf: must be finite, at least 0'),
    ({'codec': 'int3'}, "--codec='int3': must be one of int1"),
  ],
)
def test_a_wrong_value_is_named(values, message):
  with pytest.raises(ConfigError) as caught:
    dataclasses.replace(SMALL, **values)
  [problem] = caught.value.problems
  assert problem.startswith(message)


# The command -----------------------------------------------------------------


def _start(*argv):
  return subprocess.run(
    [sys.executable, '-m', 'diloco.plan', *argv],
    capture_output=True,
    text=True,
    timeout=240,
  )


def test_speeds_of_hosts_are_those_that_the_bench_wrote():
  speeds = MEASURED
  assert '--write_speeds' in speeds.command
  assert speeds.machine and speeds.date >= '2026-11-24'
  assert speeds.encode > 0 and speeds.take_in > 0
  assert 0 < speeds.round_each < speeds.round


def test_the_command_prints_the_plan(monkeypatch):
  monkeypatch.setattr(planner, 'host_speeds', lambda: MEASURED)
  done = _start(
    '--params=12B', '--learners=4', '--bandwidth_gbps=2', '--step_s=1.3'
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines() == list(planner.lines(planner.RunPlan(LARGE)))


def test_one_command_plans_for_slices():
  """5 B on 4 × v5e-256: fit, bandwidth, goodput and the syncer, in one go."""
  done = _start('5B', '--on=4xv5e-256', '--gbps=2')
  assert done.returncode == 0, done.stderr
  text = ' '.join(done.stdout.split())
  for words in (
    'each learner on v5litepod-256: 256 chips of v5e, 64 hosts',
    'T = 1.559 s',  # 6 · 5e9 · 2²⁰ / (0.4 · 256 · 197e12).
    'it fits: 332 MB are 2.1 % of 16 GB',
    "Gbit/s of a learner's link are needed",
    'goodput wait 99.74 %',
    'elastic 99.98 %',
    "memory of each of a learner's 64 hosts",
    'its machine: 4 CPUs, 94 GiB of memory, 215 GiB of disk',
  ):
    assert words in text


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('4xv5e-255', '--on=v5e-255: unknown; did you mean v5litepod-256?'),
    ('0xv5e-8', '--on=0xv5e-8: must be learners x slice, such as 4xv5e-256'),
    ('4', '--on=4: must be learners x slice'),
  ],
)
def test_slices_that_are_not(text, message):
  with pytest.raises(ConfigError) as caught:
    planner.parse_slices(text)
  assert caught.value.problems[0].startswith(message)


def test_learners_on_slices():
  learners, of = planner.parse_slices('4xv5p-16')
  assert (learners, of.name, of.chips, of.hosts) == (4, 'v5p-16', 8, 2)
  assert planner.parse_slices('v5e-8')[0] == 1
  # 6 · 10⁹ · 10⁶ FLOPs at 40 % of 8 · 459 TFLOP/s.
  assert planner.step_seconds(of, 6e15) == pytest.approx(6e15 / 1.4688e15)
  one, three = (planner.on_slices('4xv5p-16', 6e15, 1, n) for n in (1, 3))
  assert three['chips'] == 3 * one['chips'] == 4 * 3 * 8
  assert three['step_s'] == pytest.approx(one['step_s'] / 3)


def test_what_is_said_twice_is_refused():
  done = _start('5B', '--params=5B', '--on=v5e-8', '--chips=4', '--gbps=2')
  assert done.returncode == 78
  assert done.stderr.splitlines() == [
    "error: '5B': --params=5e+09 is given; all else is flags",
    'error: --chips: --on=v5e-8 says it',
  ]


def test_the_command_lists_all_that_is_wrong():
  done = _start('now', '--learners=4')
  assert done.returncode == 78
  assert done.stderr.splitlines() == [
    "error: 'now': must be a number, such as 12e9 or 12B",
    'error: --params: is missing. Parameters of the model, such as 12e9 or '
    '12B.',
    "error: --bandwidth_gbps: is missing. Gbit/s of a learner's link, each "
    'way, such as 2.',
    'error: --step_s: is missing. Seconds that an inner step takes, such as '
    '1.3.',
  ]


def test_planning_imports_no_jax():
  code = "import sys, diloco.plan; print('jax' in sys.modules)"
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, timeout=240
  )
  assert done.stdout == 'False\n', done.stderr
