# SPDX-License-Identifier: Apache-2.0
"""The goodput study: what its tables say, and that they can be had again."""

import math

import pytest

from diloco.config import simulation
from diloco.config.sections import ConfigError
from diloco.fleets import pauses
from diloco.fleets.pauses import MeasuredPause
from diloco.fleets.systems import DECOUPLED
from diloco.library import questions
from diloco.pages.parts import Chart, Table
from diloco.studies import goodput
from diloco.studies import study as studies
from diloco.studies.goodput import Row
from experiments import goodput as experiment
from experiments import scavenging

MODES = ['wait', 'restart', 'elastic']


def _config(study=(), **sections):
  config = experiment.get_config('quicktest')
  config.study.learner_hours = 0.2
  config.study.update(dict(study))
  for section, changes in sections.items():
    if isinstance(changes, dict):
      config[section].update(changes)
    else:
      config[section] = changes
  return simulation.build(config.lock())


def _report(config):
  return goodput.report(config, say=lambda line: None)


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


def test_every_result_names_its_recovery(report):
  """Once all were of learners that are not built."""
  table = _part(report, 'goodput')
  rows = [row[:3] for row in table.rows if row[3] == 'simulated']
  assert rows == [
    ('data-parallel', 1, 'wait'),
    ('elastic data-parallel', 1, 'elastic'),
    *((DECOUPLED, m, mode) for m in (2, 4) for mode in MODES),
  ]
  assert any('A launch does `wait`' in text for text in report.paragraphs)


def test_what_a_launch_does_is_worse_than_what_is_not_built(report):
  table = _part(report, 'goodput')
  wait, restart, elastic = (
    _values(table, '600k', by='simulated', learners=2, recovery=mode)[0]
    for mode in MODES
  )
  assert wait < elastic and restart < elastic


def test_all_goodputs_are_shares_and_below_their_uptime(report):
  goods = _values(_part(report, 'goodput'), '2.4M', by='simulated')
  ups = _values(_part(report, 'uptime'), '2.4M', by='simulated')
  assert all(0 < g <= u <= 100 for g, u in zip(goods, ups))


def test_the_closed_form_stands_beside_it(report):
  table = _part(report, 'goodput')
  wait, _, elastic = _values(table, '2.4M', by='closed form', learners=4)
  assert elastic == pytest.approx(69.4, abs=0.05)
  # 1.52 s between two failures of a learner; each costs 80.
  assert wait == pytest.approx(100 / (1 + 80 * 6e5 / (365 * 86_400)))


def test_restarting_learners_meet_their_formula():
  """8 learners on 1.2 M chips reach g₀·e^(−λ(1 + g₀)·2.75 T), T = 8 s."""
  config = _config(
    {'chips': (1_200_000,), 'learners': (8,), 'learner_hours': 8.0, 'seeds': 1},
    failures={'recovery': 'restart'},
  )
  row = Row(DECOUPLED, 8, 'restart')
  cell = goodput.cell_of(config, row, 1_200_000)
  assert cell.closed['goodput'] == pytest.approx(0.730, abs=0.001)
  assert cell.mean('goodput') == pytest.approx(0.730, abs=0.05)


def test_the_paper_stands_beside_its_own_setting(report):
  table = _part(report, 'goodput')
  assert _values(table, '600k', by='paper', learners=4) == [89]
  assert _values(table, 'recovery', by='paper', learners=4) == ['elastic']
  assert 'against the paper' in ' '.join(table.notes)


def _checked(**sections):
  """The cheap cells: three of elastic data-parallel, that hold."""
  study = {'systems': ('elastic data-parallel',), 'learner_hours': 0.5}
  study['chips'] = (300_000, 600_000, 2_400_000)
  return goodput.check(_config(study, **sections), say=lambda line: None)


def test_the_simulator_meets_the_paper():
  page, holds = _checked()
  table = _part(page, 'check')
  assert holds, table
  assert _values(table, 'paper') == [80, 69, 40]
  for simulated, paper, off in zip(
    *(_values(table, x) for x in ('simulated', 'paper', 'difference'))
  ):
    assert off == pytest.approx(simulated - paper)
  assert table.notes[-1].startswith('It holds')


@pytest.mark.parametrize(
  'fault', [{'pause_s': 20.0}, {'pause_s': 8.0}, {'mtbi_days': 500.0}]
)
def test_a_planted_fault_fails_the_check(fault):
  page, holds = _checked(failures=fault)
  assert not holds
  assert _part(page, 'check').notes[-1].startswith('IT DOES NOT HOLD')


def test_one_cell_that_is_far_off_fails_the_check(monkeypatch):
  """The mean alone would hide it."""
  monkeypatch.setattr(goodput, 'CHECK_MEAN', 100.0)
  assert _checked()[1]
  assert not _checked(failures={'pause_s': 20.0})[1]


def test_a_check_of_nothing_is_refused():
  with pytest.raises(ConfigError, match='Table 1 has none of study'):
    goodput.check(_config({'chips': (1000,)}), say=lambda line: None)
  with pytest.raises(ConfigError, match='goodput, not of scavenging'):
    questions.check(simulation.build(scavenging.get_config()))


def test_a_measured_pause_is_a_row_of_its_own(monkeypatch):
  entry = MeasuredPause(1e7, 3, 1, 'cold', 0.5, 1.5, 'CPU', '2026', 'abc')
  monkeypatch.setattr(pauses, 'measured', lambda: (entry,))
  report = _report(_config({'systems': ('elastic data-parallel',)}))
  (own,) = _values(
    _part(report, 'goodput'), '2.4M', by='closed form, pause 1 s'
  )
  assert own == pytest.approx(87.5, abs=0.1)
  said = ' '.join(report.paragraphs)
  assert "a reconfiguration takes the paper's fitted 13.7 s" in said
  assert '1 s, measured here: 10 M, 3 slices of 1 host, CPU, cold' in said


def test_the_paper_says_nothing_of_other_settings(monkeypatch):
  monkeypatch.setattr(pauses, 'measured', lambda: ())
  config = _config(
    {'systems': ('elastic data-parallel',)}, failures={'pause_s': 20.0}
  )
  table = _part(_report(config), 'goodput')
  assert _values(table, 'by') == ['simulated', 'closed form']
  assert not table.notes


def test_one_recovery_alone_and_one_that_is_not():
  config = _config({'systems': (DECOUPLED,)}, failures={'recovery': 'wait'})
  assert {row.recovery for row in goodput.rows(config)} == {'wait'}
  with pytest.raises(ConfigError, match="'never' must be one of wait, restart"):
    _config(failures={'recovery': 'wait,never'})


def test_each_recovery_has_a_chart(report):
  charts = [part for part in report.parts if isinstance(part, Chart)]
  assert [chart.name for chart in charts] == [f'goodput_{m}' for m in MODES]
  kinds = [line.kind for line in charts[-1].lines]
  assert kinds.count('simulated') == 4
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
  config = _config({'learner_hours': 1.0, 'seeds': 1})
  row = Row(DECOUPLED, 2, 'elastic')
  until_s = goodput.seconds(config, row)
  cell = goodput.cell_of(config, row, 1_200_000)
  events = goodput.fault_events(config, row, 1_200_000, 0, until_s)
  stands_s = sum(
    min(stop.end_s, until_s) - stop.begin_s
    for stops in events.suspensions.values()
    for stop in stops
  )
  left = 1 - stands_s / (2 * until_s)
  assert cell.mean('goodput') == pytest.approx(left, abs=0.005)


def test_data_parallel_runs_are_longer():
  config = _config()
  one = goodput.seconds(config, Row('elastic data-parallel', 1, 'elastic'))
  assert one == goodput.LOCKSTEP_LONGER * 720.0
  assert goodput.seconds(config, Row(DECOUPLED, 2, 'wait')) == 360.0


def test_a_slow_part_slows_data_parallel_as_a_whole():
  """Three parts of four idle where one has half the speed."""
  config = _config(
    {'systems': ('elastic data-parallel',)},
    fleet={'slow_learners': 1, 'slow_gap': 0.5},
    failures={'mtbi_days': math.inf},
  )
  cells = goodput.simulate(config, say=lambda line: None)
  cell = cells[Row('elastic data-parallel', 1, 'elastic'), 600_000]
  assert cell.mean('goodput') == pytest.approx((1 + 3 * 0.5) / 4, rel=0.001)


def test_a_spread_needs_two_seeds():
  runs = [{'goodput': 0.5}, {'goodput': 0.7}]
  assert studies.spread(runs[:1], 'goodput') is None
  assert studies.mean(runs, 'goodput') == pytest.approx(0.6)
  assert studies.spread(runs, 'goodput') == pytest.approx(0.2 / math.sqrt(2))
