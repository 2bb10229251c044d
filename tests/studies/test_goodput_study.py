# SPDX-License-Identifier: Apache-2.0
"""The goodput study: what its tables say, and that they can be had again."""

import dataclasses
import math

import pytest

from diloco.config import simulation
from diloco.fleets import failures
from diloco.fleets.systems import DECOUPLED, RECOVERIES
from diloco.pages.parts import Chart, Table, Timeline
from diloco.studies import goodput as studies_goodput
from diloco.studies import goodput_cells, goodput_tables, traces
from diloco.studies.goodput_cells import GoodputCell, GoodputRun
from experiments import goodput as experiments_goodput

LOCKSTEP = ('synchronous DiLoCo', 'streaming DiLoCo')


def _config(study=(), **sections):
  config = experiments_goodput.get_config('quicktest')
  config.study.update(learner_hours=0.2, timeline_s=100.0)
  config.study.update(dict(study))
  for section, changes in sections.items():
    if isinstance(changes, dict):
      config[section].update(changes)
    else:
      config[section] = changes
  return simulation.build(config.lock())


def _report(config):
  return studies_goodput.report(config, say=lambda line: None)


@pytest.fixture(scope='module')
def report():
  return _report(_config())


def _part(report, name: str):
  (part,) = [part for part in report.parts if part.name == name]
  return part


def _values(table: Table, column: str, **where) -> list:
  names = [c.name for c in table.columns]
  return [
    row[names.index(column)]
    for row in table.rows
    if all(row[names.index(key)] == value for key, value in where.items())
  ]


def test_every_system_has_a_simulated_row(report):
  systems = _values(_part(report, 'goodput'), 'system', by='simulated')
  assert systems == [
    'data-parallel', 'elastic data-parallel', *LOCKSTEP, DECOUPLED, DECOUPLED,
  ]  # fmt: skip


def test_all_goodputs_are_shares_and_below_their_uptime(report):
  goods = _values(_part(report, 'goodput'), '2.4M', by='simulated')
  ups = _values(_part(report, 'uptime'), '2.4M', by='simulated')
  assert all(0 < g <= u <= 100 for g, u in zip(goods, ups))


def test_the_closed_form_stands_where_there_is_one(report):
  table = _part(report, 'goodput')
  systems = set(_values(table, 'system', by='closed form'))
  assert systems == {'data-parallel', 'elastic data-parallel', DECOUPLED}
  four = _values(table, '2.4M', by='closed form', learners=4)
  assert four == [pytest.approx(69.4, abs=0.05)]


def test_the_paper_stands_beside_its_own_setting(report):
  table = _part(report, 'goodput')
  assert _values(table, '600k', by='paper', learners=4) == [89]
  assert 'against the paper' in ' '.join(table.notes)


def test_the_paper_says_nothing_of_other_settings():
  cells = {
    ('elastic data-parallel', 1, 600_000): GoodputCell(
      'elastic data-parallel',
      1,
      600_000,
      (GoodputRun(0.7, 0.7, 100),),
      0.69,
      0.69,
    )
  }
  grid = goodput_tables.Grid(
    (('elastic data-parallel', 1),), (600_000,), cells, is_paper=False
  )
  table = goodput_tables.goodput_table(grid)
  assert _values(table, 'by') == ['simulated', 'closed form']
  assert not table.notes


def test_the_rule_is_shown_by_cells_of_equal_learners(report):
  """1 learner of 600k chips and 4 of 2.4M in all."""
  table = _part(report, 'same_goodput')
  one, four = (
    _values(table, f'M = {m}', **{'chips of a learner': '600k'})[0]
    for m in (1, 4)
  )
  goods = _part(report, 'goodput')
  assert (
    one
    == _values(goods, '600k', by='simulated', system='elastic data-parallel')[0]
  )
  assert (
    four
    == _values(goods, '2.4M', by='simulated', system=DECOUPLED, learners=4)[0]
  )


def test_rounds_are_counted_of_decoupled_diloco_only(report):
  table = _part(report, 'rounds')
  assert _values(table, 'learners') == [2, 2, 4, 4]
  assert all(0 < p <= 100 for p in _values(table, 'participation %'))
  # 5e9/24 values of 4 bits and their scales a step of 8 s, each way, less
  # where a learner stands.
  most = 5e9 / 24 * (4 + 16 / 128) / 8 / 1e9
  outs = _values(table, 'learner out Gbit/s')
  assert all(0.3 * most < out < 1.1 * most for out in outs)


def test_the_timeline_is_of_the_largest_fleet(report):
  picture = _part(report, 'timeline')
  assert isinstance(picture, Timeline)
  assert picture.lanes[:4] == tuple(f'learner {m}' for m in range(4))
  kinds = {span.kind for span in picture.spans}
  assert {'step', 'pause', 'bootstrap', 'round'} <= kinds
  assert all(
    0 <= s.begin_s < s.end_s <= 100.0 and s.lane < len(picture.lanes)
    for s in picture.spans
  )


def test_the_chart_has_all_three_kinds_of_lines(report):
  picture = _part(report, 'goodput_against_chips')
  assert isinstance(picture, Chart)
  kinds = [line.kind for line in picture.lines]
  assert kinds.count('simulated') == 6
  assert kinds.count('closed form') == 4
  assert kinds.count('paper') == 3


SMALL = {'chips': (2_400_000,), 'learners': (2,), 'seeds': 1}


def test_the_same_seed_gives_the_same_report():
  config = _config(SMALL)
  assert _report(config) == _report(config)


def test_another_seed_gives_another_report():
  one, other = (
    _part(_report(_config(SMALL, seed=seed)), 'goodput').rows for seed in (1, 2)
  )
  assert one != other


def test_the_machines_lose_nothing_but_the_pauses():
  """2 learners of 4 s steps for half an hour, K = 1: within half a point."""
  config = _config({'learner_hours': 1.0})
  until_s = goodput_cells.seconds(config, DECOUPLED, 2)
  trace = traces.drawn(config.failures, 1_200_000, 0, until_s)
  cell = goodput_cells.simulate(config, DECOUPLED, 2, [trace])
  recovery = RECOVERIES['elastic']
  every = traces.standing(trace, recovery, 2, config, until_s)
  stands_s = sum(
    min(stop.end_s, until_s) - stop.begin_s
    for one in every
    for stop in one.stops
  )
  left = 1 - stands_s / (2 * until_s)
  assert cell.mean('goodput') == pytest.approx(left, abs=0.005)


def test_lock_step_runs_are_longer():
  config = _config()
  one = goodput_cells.seconds(config, 'elastic data-parallel', 1)
  assert one == goodput_cells.LOCKSTEP_LONGER * 720.0
  assert goodput_cells.seconds(config, DECOUPLED, 2) == 360.0


def test_an_exchange_in_lock_step_is_its_bytes_and_a_round_trip():
  """1e9 values of 4 + 16/128 bits up and as many down at 1 Gbit/s: 8.25 s."""
  config = _config(network={'params': 1e9, 'learner_gbps': 1.0})
  whole = goodput_cells.exchange_of(config, 'synchronous DiLoCo')
  assert (whole.spacing_steps, whole.overlap_steps) == (24, 0)
  assert whole.exchange_s == pytest.approx(8.25 + 0.02)
  piece = goodput_cells.exchange_of(config, 'streaming DiLoCo')
  assert (piece.spacing_steps, piece.overlap_steps) == (1, 2)
  assert piece.exchange_s == pytest.approx(8.25 / 24 + 0.02)


def test_a_slow_part_slows_data_parallel_as_a_whole():
  """Three parts of four idle where one has half the speed."""
  config = _config(
    {'systems': ('elastic data-parallel',)},
    fleet={'slow_learners': 1, 'slow_gap': 0.5},
    failures={'mtbi_days': math.inf},
  )
  cells = studies_goodput.simulate(config, say=lambda line: None)
  cell = cells['elastic data-parallel', 1, 600_000]
  assert cell.mean('goodput') == pytest.approx((1 + 3 * 0.5) / 4, rel=0.001)


# A cluster's own failures ---------------------------------------------------


def _cluster(tmp_path, text: str):
  path = tmp_path / 'cluster.csv'
  path.write_text('at_s,chip,repair_s\n' + text)
  return _config(
    {**SMALL, 'systems': ('data-parallel', 'elastic data-parallel')},
    failures={'trace': str(path), 'pause_s': 10.0},
    fleet={'chips': 4096, 'slice_chips': 1024},
  )


def test_a_record_drives_all_systems(tmp_path):
  """Data-parallel stands for 110 of 400 s; elastic pauses for 20.

  It has three of four slices for 90 of the other 380.
  """
  config = _cluster(tmp_path, '100,5,100\n400,9,100\n')
  cells = studies_goodput.simulate(config, say=lambda line: None)
  wait = cells['data-parallel', 1, 4096]
  elastic = cells['elastic data-parallel', 1, 4096]
  assert wait.mean('goodput') == pytest.approx(290 / 400)
  assert elastic.mean('goodput') == pytest.approx((380 - 90 / 4) / 400)


def test_the_formula_of_a_record_has_its_rate_and_repair(tmp_path):
  config = _cluster(tmp_path, '100,5,100\n400,9,300\n')
  cells = studies_goodput.simulate(config, say=lambda line: None)
  closed = cells['data-parallel', 1, 4096].closed_goodput
  assert closed == pytest.approx(1 / (1 + 2 / 400 * (200 + 10)))


def test_a_record_without_failures_is_refused(tmp_path):
  with pytest.raises(failures.TraceError, match='it must hold some'):
    _report(_cluster(tmp_path, ''))


def test_the_report_names_the_record(tmp_path):
  config = _cluster(tmp_path, '100,5,100\n400,9,100\n')
  assert 'cluster.csv' in _report(config).paragraphs[0]


def test_a_spread_needs_two_seeds():
  cell = GoodputCell(
    'data-parallel', 1, 1, (GoodputRun(0.5, 0.5, 1),), None, None
  )
  assert cell.spread('goodput') is None
  two = dataclasses.replace(cell, runs=(*cell.runs, GoodputRun(0.7, 0.7, 1)))
  assert two.mean('goodput') == pytest.approx(0.6)
  assert two.spread('goodput') == pytest.approx(0.2 / math.sqrt(2))
