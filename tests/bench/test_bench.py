# SPDX-License-Identifier: Apache-2.0
"""The benchmarks: their frame by hand, a tiny run, and a planted slow-down."""

import json
import pathlib
import subprocess
import sys

import pytest

from diloco.bench import __main__ as bench_main
from diloco.bench import (
  machine_load,
  measurement,
  process_rows,
  real_run,
  syncer_rounds,
)
from diloco.bench.machine_load import CpuTimes, share_of_others
from diloco.bench.measurement import (
  BenchFailed,
  BenchFigure,
  BenchRow,
  BenchSettings,
  quantile,
)
from diloco.bench.rows import ROWS
from diloco.config.sections import ConfigError
from diloco.numerics import block_codec
from launch import program

pytestmark = pytest.mark.beside

SMALLEST = BenchSettings(smallest=True)
QUICK = ('int4', 'codecs', 'round', 'simulator', 'checkpoint')


def bench(*words: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, '-m', 'diloco.bench', *words],
    capture_output=True,
    text=True,
  )


def test_the_command_writes_table_json_and_history(tmp_path):
  out, history = tmp_path / 'x.json', tmp_path / 'history.jsonl'
  page = tmp_path / 'x.md'
  history.write_text('{}\n')
  done = bench(
    '--smallest', '--repeats=2', f'--only={",".join(QUICK)}', f'--json={out}',
    f'--history={history}', f'--markdown={page}',
  )  # fmt: skip
  assert done.returncode == 0, done.stdout + done.stderr
  found = json.loads(out.read_text())
  assert {figure['row'] for figure in found['figures']} == set(QUICK)
  assert not found['failed']
  for figure in found['figures']:
    assert len(figure['values']) == 2
    assert figure['least'] <= figure['median'] <= figure['most']
    assert figure['ratio'] is None or figure['ratio'] > 0
    assert figure['name'] in done.stdout
  machine = found['machine']
  assert machine['cores'] > 0
  assert machine['versions']['jax']
  assert json.loads(history.read_text().splitlines()[1]) == found
  others = machine_load.said(found['others']).split('.')[0]
  assert others in done.stdout and others in page.read_text()
  rows = [x for x in page.read_text().splitlines() if x.startswith('|')]
  assert len(rows) == 2 + len(found['figures'])
  assert len({row.count('|') for row in rows}) == 1


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_row_can_be_measured(tmp_path):
  out = tmp_path / 'x.json'
  done = bench('--all', '--smallest', '--repeats=1', f'--json={out}')
  assert done.returncode == 0, done.stdout + done.stderr
  figures = json.loads(out.read_text())['figures']
  assert {figure['row'] for figure in figures} == set(ROWS)


@pytest.mark.parametrize(
  ('check', 'message'),
  [
    (lambda: bench_main.chosen(False, []), 'give --all, or --only=ROW'),
    (lambda: bench_main.chosen(True, ['int4']), 'give --all, or --only=ROW'),
    (lambda: bench_main.chosen(False, ['x']), '--only=x: must be one of '),
    (lambda: bench_main.sizes(['0']), '--millions=0: must be numbers above 0'),
    (lambda: bench_main.crowds(['0']), '--learners=0: must be numbers above 0'),
    (lambda: bench_main.crowds(['16', 'x']), '--learners=16,x: must be'),
    (lambda: bench_main.crowds(['99999']), 'protocol.learners=99999: '),
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


def test_the_command_refuses_and_lists():
  refused = bench('--only=int5')
  assert refused.returncode == 78
  assert 'error: --only=int5: must be one of ' in refused.stderr
  listed = bench('--list')
  assert [line.split()[0] for line in listed.stdout.splitlines()] == list(ROWS)


def test_a_slow_down_raises_the_ratio(monkeypatch):
  """The codec does its work eight times: the ratio to a copy sees it."""

  def ratio() -> float:
    (found,) = (
      f for f in syncer_rounds.measure_int4(SMALLEST) if f.name == 'int4 encode'
    )
    return found.ratio

  before = ratio()
  encode = block_codec.BlockCodec.encode

  def slow(self, x, rng=None):
    for _ in range(7):
      encode(self, x, rng)
    return encode(self, x, rng)

  monkeypatch.setattr(block_codec.BlockCodec, 'encode', slow)
  assert ratio() > 2 * before


def test_a_row_that_fails_does_not_stop_the_others(monkeypatch):
  def fail(settings):
    raise BenchFailed('no learner came')

  good = BenchRow('x', lambda settings: [BenchFigure('a', 1.0, 's')], 10.0)
  rows = {'bad': BenchRow('x', fail, 20.0), 'good': good}
  monkeypatch.setattr(bench_main, 'ROWS', rows)
  monkeypatch.setattr(
    bench_main, 'count', lambda done, of, _, share: f'{done}/{of} {share:.2f}'
  )
  said = []
  found, failed = bench_main.measure(list(rows), SMALLEST, 1, said.append)
  assert said == [
    '0/2 0.00  bad, repetition 1 of 1', '1/2 0.67  good, repetition 1 of 1',
  ]  # fmt: skip
  assert failed == {'bad': 'no learner came'}
  assert [figure.row for figure in found] == ['good']
  with pytest.raises(ConfigError, match='--only=int4: must be one of bad'):
    bench_main.chosen(False, ['int4'])


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
    (CpuTimes(110.0, 54.0, 8.5), 0.45),
    (CpuTimes(110.0, 54.0, 20.0), 0.0),  # Ticks are coarse: never negative.
    (CpuTimes(100.0, 50.0, 7.0), None),  # No time has passed.
    (None, None),
  ],
)
def test_what_others_used_by_hand(end, share):
  found = share_of_others(CpuTimes(100.0, 50.0, 7.0), end)
  assert found == (share if share is None else pytest.approx(share))


def test_others_are_told():
  assert 'used 45%' in machine_load.said(0.45)
  assert 'not those of a quiet machine' in machine_load.said(0.45)
  assert 'quiet' not in machine_load.said(0.01)
  assert 'is not known' in machine_load.said(None)


def test_quantiles_by_hand():
  values = [float(i) for i in range(1, 101)]
  assert [quantile(values, q) for q in (0.0, 0.5, 0.99, 1.0)] == [
    1.0, 50.0, 99.0, 100.0,
  ]  # fmt: skip


def test_processes_get_the_allocator_settings_of_the_launcher():
  assert real_run.MALLOC == program.MALLOC


def test_crowds_have_a_configuration_that_a_syncer_accepts():
  assert bench_main.crowds(['16', '64', '256']) == (16, 64, 256)


def test_a_gap_counts_where_it_touches_the_span():
  times_s = [0.0, 1.0, 3.0, 3.5, 7.0]
  assert process_rows.longest_gap_s(times_s, 1.5, 3.2) == 2.0
  assert process_rows.longest_gap_s(times_s, 3.2, 4.0) == 3.5
  assert process_rows.longest_gap_s([], 1.0, 4.0) == 3.0


def test_a_stall_raises_the_ratio_to_the_twin():
  """One of ten steps takes four times as long as all others."""
  alone = [[{'perf/step_s': 0.1, 'perf/stall_s': 0.0}] * 10]
  late = {'perf/step_s': 0.4, 'perf/stall_s': 0.3}
  synced = [[*alone[0][1:], late]]
  titles = ('longest', 'median')
  stalls = process_rows.stalls('x', synced, alone, 'its twin', titles)
  found = {f.name: f for f in stalls}
  longest = found['x, longest step stall']
  assert (longest.value, longest.ratio) == pytest.approx((300.0, 4.0))
  assert found['x, median step stall'].ratio == pytest.approx(1.0)


def test_the_plain_socket_carries_the_bytes_both_ways():
  process_rows.socket_round_trip(3_000_000)
