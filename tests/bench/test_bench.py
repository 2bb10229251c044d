# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: their frame by hand, a tiny run, and a planted slow-down."""

import json
import pathlib
from types import SimpleNamespace

import pytest

from diloco.bench import __main__ as bench_main
from diloco.bench import measurement, rows
from diloco.bench.measurement import (
  BenchFailed,
  BenchFigure,
  BenchRow,
  BenchSettings,
  quantile,
  share_of_others,
)
from diloco.bench.rows import ROWS
from diloco.config.sections import ConfigError
from diloco.numerics import codec
from diloco.sizing import planner
from tests.commands import output, refused

pytestmark = pytest.mark.beside

SMALLEST = BenchSettings(smallest=True)
QUICK = ('round', 'int4', 'simulator')
BENCH = '-m', 'diloco.bench'


def test_the_command_writes_table_and_json(tmp_path):
  out, page = tmp_path / 'x.json', tmp_path / 'x.md'
  said = output(
    *BENCH, '--smallest', '--repeats=2', f'--only={",".join(QUICK)}',
    f'--json={out}', f'--markdown={page}',
  )  # fmt: skip
  found = json.loads(out.read_text())
  assert {figure['row'] for figure in found['figures']} == set(QUICK)
  assert not found['failed']
  for figure in found['figures']:
    assert len(figure['values']) == 2
    assert figure['least'] <= figure['median'] <= figure['most']
    assert figure['ratio'] is None or figure['ratio'] > 0
    assert figure['name'] in said
  machine = found['machine']
  assert machine['cores'] > 0
  assert machine['versions']['jax']
  others = measurement.sentence(found['others']).split('.')[0]
  assert others in said and others in page.read_text()
  lines = [x for x in page.read_text().splitlines() if x.startswith('|')]
  assert len(lines) == 2 + len(found['figures'])
  assert len({line.count('|') for line in lines}) == 1


def test_the_planner_reads_what_is_written_of_hosts():
  seconds = {'encode': 0.2, 'take in': 0.3}
  seconds |= {f'round of {rows.FEW}': 1.0, f'round of {rows.MANY}': 4.0}
  figures = [
    SimpleNamespace(row=rows.HOSTS, name=name, median=x, others=0.1)
    for name, x in seconds.items()
  ]
  machine = {'cpu': 'a', 'cores_allowed': 2, 'time': '2026', 'commit': ''}
  written = bench_main.speeds_of(
    SimpleNamespace(machine=machine, figures=figures)
  )
  speeds = planner.HostSpeeds(**json.loads(json.dumps(written)))
  assert (speeds.encode, speeds.take_in) == (0.2, 0.3)
  assert speeds.round_of(rows.FEW) == 1.0
  assert speeds.round_of(rows.MANY) == 4.0


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_row_can_be_measured(tmp_path):
  out = tmp_path / 'x.json'
  output(*BENCH, '--all', '--smallest', '--repeats=1', f'--json={out}')
  figures = json.loads(out.read_text())['figures']
  assert {figure['row'] for figure in figures} == set(ROWS)


@pytest.mark.parametrize(
  ('check', 'message'),
  [
    (lambda: bench_main.chosen(False, []), 'give --all, or --only=ROW'),
    (lambda: bench_main.chosen(True, ['int4']), 'give --all, or --only=ROW'),
    (lambda: bench_main.chosen(False, ['x']), '--only=x: must be one of '),
    (lambda: bench_main.sizes(['0']), '--millions=0: must be numbers above 0'),
    (lambda: bench_main.sizes(['1', 'x']), '--millions=1,x: must be numbers'),
    (
      lambda: bench_main.check_writable([pathlib.Path('/dev/null/x')]),
      '/dev/null/x: ',
    ),
  ],
)
def test_a_mistake_is_named_before_anything_is_measured(check, message):
  with pytest.raises(ConfigError, match=message):
    check()


def test_the_command_refuses():
  [said] = refused(*BENCH, '--only=long', '--millions=0')
  assert said == 'error: --millions=0: must be numbers above 0, such as 1,10'


def test_a_slow_down_raises_the_ratio(monkeypatch):
  """The codec does its work eight times: the ratio to a copy sees it."""

  def ratio() -> float:
    encode, *_ = rows.measure_codecs(SMALLEST, ('int4',))
    return encode.ratio

  before = ratio()
  encode = codec.BlockCodec.encode

  def slow(self, x):
    for _ in range(7):
      encode(self, x)
    return encode(self, x)

  monkeypatch.setattr(codec.BlockCodec, 'encode', slow)
  assert ratio() > 2 * before


def test_a_row_that_fails_does_not_stop_the_others(monkeypatch):
  def fail(settings):
    raise BenchFailed('no learner came')

  good = BenchRow('x', lambda settings: [BenchFigure('a', 1.0, 's')], 10.0)
  both = {'bad': BenchRow('x', fail, 20.0), 'good': good}
  monkeypatch.setattr(bench_main, 'ROWS', both)
  monkeypatch.setattr(
    bench_main, 'count', lambda done, of, _, share: f'{done}/{of} {share:.2f}'
  )
  said = []
  found, failed = bench_main.measure(list(both), SMALLEST, 1, said.append)
  assert said == [
    '0/2 0.00  bad, repetition 1 of 1', '1/2 0.67  good, repetition 1 of 1',
  ]  # fmt: skip
  assert failed == {'bad': 'no learner came'}
  assert [figure.row for figure in found] == ['good']


def test_repetitions_become_median_and_spread():
  repetitions = [
    [BenchFigure('a', v, 's', r, 'b'), BenchFigure('c', 2 * v, 's')]
    for v, r in ((3.0, 1.5), (1.0, 4.0), (2.0, 2.0))
  ]
  a, c = measurement.repeated('row', repetitions, 0.25)
  assert (a.median, a.ratio, a.values) == (2.0, 2.0, (3.0, 1.0, 2.0))
  assert (c.median, c.ratio) == (4.0, None)
  assert a.plain()['least'] == 1.0


@pytest.mark.parametrize(
  ('end', 'share'),
  [
    # Of 10 s, 4 idle, 1.5 its own: 4.5 are others'.
    ((110.0, 54.0, 8.5), 0.45),
    ((110.0, 54.0, 20.0), 0.0),  # Ticks are coarse: never negative.
    ((100.0, 50.0, 7.0), 0.0),  # No time has passed.
  ],
)
def test_what_others_used_by_hand(end, share):
  found = share_of_others((100.0, 50.0, 7.0), end)
  assert found == pytest.approx(share)


def test_quantiles_by_hand():
  values = [float(i) for i in range(1, 101)]
  assert [quantile(values, q) for q in (0.0, 0.5, 0.99, 1.0)] == [
    1.0, 50.0, 99.0, 100.0,
  ]  # fmt: skip


def test_growth_is_the_last_third_over_the_first():
  """120 s from 1000 on: 10 s are a warm-up, thirds have 36.7 s."""
  points = [(1000.0 + t, 99.0 if t < 10 else float(t)) for t in range(120)]
  found = rows.growth('x', 'MB', 0.5, points, 1000.0, 120.0)
  assert found.value == 101.0 and found.ratio == 101 / 28
  with pytest.raises(BenchFailed, match='x: too few; give more --minutes'):
    rows.growth('x', 'MB', 0.5, points[:60], 1000.0, 120.0)


def test_a_stall_raises_the_ratio_to_the_twin():
  """One of ten steps takes four times as long as all others."""
  alone = [[{'perf/step_s': 0.1, 'perf/stall_s': 0.0}] * 10]
  late = {'perf/step_s': 0.4, 'perf/stall_s': 0.3}
  synced = [[*alone[0][1:], late]]
  titles = ('longest', 'median')
  stalls = rows.stalls('x', synced, alone, 'its twin', titles)
  found = {f.name: f for f in stalls}
  longest = found['x, longest step stall']
  assert (longest.value, longest.ratio) == pytest.approx((300.0, 4.0))
  assert found['x, median step stall'].ratio == pytest.approx(1.0)
