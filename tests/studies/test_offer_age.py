# SPDX-License-Identifier: Apache-2.0
"""Ages of merged offers, and what they were before offers kept the phase."""

import dataclasses

import pytest

from diloco import simulation_config
from diloco.protocol import learner, offering
from diloco.studies import offer_age
from experiments import offer_age as experiment

CELLS = [
  offer_age.Cell(False, 1, 4, 1, 1),
  offer_age.Cell(False, 1, 4, 2, 8),
  offer_age.Cell(False, 6, 4, 1, 24),
  offer_age.Cell(True, 4, 4, 1, 4),
]


def config_of(steps: int):
  config = experiment.get_config()
  config.study.update(steps=steps, seeds=1)
  return simulation_config.build(config)


@pytest.mark.parametrize('cell', CELLS, ids=str)
def test_what_is_merged_is_of_the_last_boundary(cell):
  ages = offer_age.measure(config_of(480), cell)
  # A learner has its lead once it was late: at P = 1 that is one in 20 rounds.
  lenient = dataclasses.replace(ages, merged=ages.merged + 0.05)
  assert lenient.reached(cell.far), ages


@pytest.mark.parametrize(
  'cell,steps',
  [
    (offer_age.Cell(False, 1, 8, 1, 24), 120),  # A round at each step.
    (offer_age.Cell(False, 6, 8, 1, 8), 240),  # Rounds open for two steps.
  ],
  ids=str,
)
def test_many_learners_reach_the_aims_too(cell, steps):
  ages = offer_age.measure(config_of(steps), cell)
  assert ages.reached(False), ages


def test_offers_by_own_steps_without_refresh_are_old(monkeypatch):
  """As it was: s own steps after the last offer, whatever t is."""

  monkeypatch.setattr(offering.View, 'moved', lambda self, *_: self)
  monkeypatch.setattr(learner.Learner, '_refresh', lambda self: None)
  monkeypatch.setattr(offering, 'lead_max', lambda config: 0)
  ages = offer_age.measure(config_of(480), CELLS[0])
  assert not ages.reached(False), ages


def test_the_table_has_a_row_for_each_cell():
  config = experiment.get_config('quicktest')
  config.study.update(steps=48, learners=(2,), fragments=(1, 24))
  report = offer_age.report(simulation_config.build(config), lambda line: None)
  [table] = report.parts
  assert [row[:5] for row in table.rows] == [
    ('near', 1, 2, 1, 1),
    ('near', 1, 2, 1, 24),
    ('0.7 steps', 4, 2, 1, 1),
    ('0.7 steps', 4, 2, 1, 24),
  ]
