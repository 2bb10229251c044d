# SPDX-License-Identifier: Apache-2.0
"""The bandwidth study says what was found, what is exact, and the paper's."""

import pytest

from diloco.config import simulation
from diloco.pages.parts import Table
from diloco.studies import bandwidth
from experiments import bandwidth as experiment


def _config(**study):
  config = experiment.get_config('quicktest')
  config.study.update(study)
  return simulation.build(config.lock())


@pytest.fixture(scope='module')
def found():
  return bandwidth.report(_config(), lambda line: None)


def _column(table, name):
  return [column.name for column in table.columns].index(name)


def _row(table, *key):
  [row] = [r for r in table.rows if r[: len(key)] == key]
  return row


def _part(found, name):
  [part] = [p for p in found.parts if p.name == name]
  return part


def test_the_papers_figures_stand_beside_ours(found):
  table = _part(found, 'bandwidth_2_1')
  at = _column(table, '90 %')
  for system, published in bandwidth.PAPER_GBPS.items():
    assert _row(table, system, 'paper')[at] == published
    exact = _row(table, system, 'closed form')[at]
    assert exact == pytest.approx(published, rel=0.02)


def test_the_papers_figures_stand_only_where_they_belong(found):
  assert 'paper' not in [r[1] for r in _part(found, 'bandwidth_8_1').rows]


def test_bandwidths_are_shown_as_on_the_authors_page():
  shown = [bandwidth.shown(gbps) for gbps in (0.4249, 3.16, 9.94, 103.6)]
  assert shown == ['0.42', '3.2', '9.9', '104']


def test_one_data_centre_needs_nothing():
  config = _config(datacentres=(1,))
  table, *_ = bandwidth.report(config, lambda line: None).parts
  assert {row[2] for row in table.rows} == {0.0}


def test_machines_on_a_narrow_link_lose_rounds_and_no_steps(found):
  table = _part(found, 'bandwidth_machines')
  assert isinstance(table, Table)
  pace, stepping = (_column(table, name) for name in ('pace %', 'stepping %'))
  bf16, int4 = table.rows
  assert bf16[0] == 'bf16' and int4[0] == 'int4'
  assert bf16[stepping] > 99 and int4[stepping] > 99
  assert bf16[pace] < 50 < int4[pace]


def test_no_link_carries_more_than_it_can(found):
  table = _part(found, 'bandwidth_machines')
  mean, peak = (_column(table, f'{name} Gbit/s') for name in ('mean', 'peak'))
  for row in table.rows:
    assert 0 < row[mean] <= row[peak] <= row[1] * (1 + 1e-9)
