# SPDX-License-Identifier: Apache-2.0
"""The fault benchmark: its figures by hand, its table, and a run of it."""

import io
import json
import subprocess
import sys

import pytest
import rich.console

from launch.chaos.live_run import Tail, WrittenStep
from tests.chaos import fault_table
from tests.chaos.fault_scenarios import figures

pytestmark = pytest.mark.beside

FLOOR_S = 0.02


def steps(*times_s, stall_s=0.001):
  return [
    WrittenStep(t, 1, i, 0.02, stall_s) for i, t in enumerate(times_s, start=1)
  ]


def test_figures_of_a_span():
  """Four steps in one second, of 20 ms each, of which 1 ms stalls."""
  found = figures(steps(0.9, 1.1, 1.3, 1.6, 1.9, 2.1), 1.0, 2.0, FLOOR_S)
  assert found.steps == 4
  assert found.steps_per_s == pytest.approx(4.0)
  assert found.goodput == pytest.approx(4 * 0.019)
  assert (found.stall_max_s, found.stall_p99_s) == (0.001, 0.001)
  assert found.excess_max_s == pytest.approx(0.3 - FLOOR_S)


def test_the_99th_percentile_leaves_out_one_in_a_hundred():
  many = steps(*(i / 100 for i in range(1, 100)))
  found = figures(
    [*many, WrittenStep(1.0, 1, 100, 0.02, 0.5)], 0.0, 1.0, FLOOR_S
  )
  assert (found.stall_max_s, found.stall_p99_s) == (0.5, 0.001)


@pytest.mark.parametrize(
  ('times_s', 'longest_s'),
  [
    ((0.9, 1.1, 1.9, 2.8), 0.9),  # It began inside, and ended later.
    ((0.2, 1.2, 1.8, 2.0), 1.0),  # It began earlier.
    ((0.5, 4.0), 3.5),  # No step inside.
    ((0.9, 1.1), 0.9),  # And none came since: open.
    ((), 1.0),
  ],
)
def test_a_gap_counts_where_it_touches_the_span(times_s, longest_s):
  found = figures(steps(*times_s), 1.0, 2.0, floor_s=0.0)
  assert found.excess_max_s == pytest.approx(longest_s)


def test_a_span_without_a_step_is_one_stall():
  found = figures(steps(0.5, 4.0), 1.0, 2.0, FLOOR_S)
  assert (found.stall_max_s, found.stall_p99_s) == (1.0, 1.0)


def test_the_table_has_median_worst_and_target():
  measured = {
    'syncer killed': [
      {'listens_to_merge_s': s, 'goodput_before': g, 'goodput_points_during': c}
      for s, g, c in ((1.0, 0.9, 0.5), (3.0, 0.8, -0.5), (1.5, 0.95, 2.0))
    ]
  }
  console = rich.console.Console(width=150, file=io.StringIO())
  console.print(fault_table.show('x', 3, measured))
  lines = [
    ' '.join(line.split()) for line in console.file.getvalue().splitlines()
  ]
  assert '"listens" to next merge s 1.50 (3.00) ! ≤ 2.00 s' in lines
  assert 'goodput, before % 90.0 (80.0)' in lines
  assert 'goodput change, away points 0.5 (-0.5) ≥ -1.0 points' in lines


def test_the_summary_is_plain_data():
  measured = {'no fault': [{'stall_max_s/learner-1': s} for s in (0.06, 0.02)]}
  (found,) = fault_table.summary(2, measured)
  assert found == {
    'figure': 'stall_max_s/learner-1',
    'scenario': 'no fault',
    'median': 0.04,
    'worst': 0.06,
    'values': [0.06, 0.02],
    'target': '≤ 50 ms',
    'met': False,
  }


def test_a_tail_reads_whole_lines_once(tmp_path):
  path = tmp_path / 'x.jsonl'
  tail = Tail(path)
  assert tail.new_records() == []
  path.write_text('{"a": 1}\n{"a"')
  assert tail.new_records() == [{'a': 1}]
  assert tail.new_records() == []
  path.write_text('{"a": 1}\n{"a": 2}\n')  # The torn line was cut meanwhile.
  assert tail.new_records() == [{'a': 2}]


def test_a_tail_names_a_line_that_is_none(tmp_path):
  path = tmp_path / 'x.jsonl'
  path.write_text('{"a": 1}\n{"a"{"a": 3}\n')
  with pytest.raises(ValueError, match=r'x\.jsonl at byte 9: '):
    Tail(path).new_records()


def benchmark(*flags):
  return subprocess.run(
    [sys.executable, '-m', 'tests.chaos.fault_benchmark', *flags],
    capture_output=True,
    text=True,
  )


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('--config.run.log_every_steps=2', 'must be 1, every step is looked at'),
    ('--data_plane=tcp', 'value should be one of <jax_transfer|grpc>'),
  ],
)
def test_a_mistake_ends_before_a_process_is_started(tmp_path, flag, message):
  done = benchmark(f'--workdir={tmp_path}', flag)
  assert done.returncode == 78
  assert message in done.stderr
  assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_it_measures_every_fault(tmp_path):
  out = tmp_path / 'figures.json'
  done = benchmark(
    f'--workdir={tmp_path / "run"}', f'--out={out}', '--repeats=1',
    '--seconds=2', '--data_plane=grpc',
  )  # fmt: skip
  assert done.returncode == 0, done.stdout + done.stderr
  found = json.loads(out.read_text())
  assert {entry['scenario'] for entry in found['figures']} == {
    'no fault', 'learner killed', 'syncer killed', 'learner stopped',
  }  # fmt: skip
