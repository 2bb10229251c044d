# SPDX-License-Identifier: Apache-2.0
"""Ages of merged offers, and what they were before offers kept the phase."""

import pytest

from diloco.config import simulation
from diloco.protocol.learner import bootstrap as learner_bootstrap
from diloco.protocol.learner import offers, snapshots
from diloco.studies import offer_age
from experiments import offer_age as experiment

# Link, τ, M, K, P; and how many steps.
CELLS = [
  (offer_age.OfferAgeSetting(False, 1, 4, 1, 1), 240),
  (offer_age.OfferAgeSetting(False, 1, 4, 2, 1), 240),
  (offer_age.OfferAgeSetting(False, 1, 2, 1, 2), 240),
  (offer_age.OfferAgeSetting(False, 1, 4, 2, 8), 240),
  (offer_age.OfferAgeSetting(False, 6, 4, 1, 24), 120),
  (offer_age.OfferAgeSetting(True, 4, 4, 1, 4), 240),
  (offer_age.OfferAgeSetting(False, 1, 8, 1, 24), 120),  # A round at each step.
  (
    offer_age.OfferAgeSetting(False, 6, 8, 1, 8),
    240,
  ),  # Rounds open for two steps.
]


def config_of(steps: int):
  config = experiment.get_config()
  config.study.update(steps=steps, seeds=1)
  return simulation.build(config)


@pytest.mark.parametrize('cell,steps', CELLS, ids=str)
def test_what_is_merged_is_of_the_last_boundary(cell, steps):
  ages = offer_age.measure(config_of(steps), cell)
  assert ages.reached(cell.far), ages


def test_copies_are_not_spent_on_rounds_that_have_closed():
  """Two rounds are open at a time, and a boundary has one copy for them."""
  cell = offer_age.OfferAgeSetting(True, 4, 4, 2, 8)
  ages = offer_age.measure(config_of(240), cell)
  assert ages.reached(far=False), ages


def test_a_learner_that_begins_without_a_lead_is_late_once(monkeypatch):
  monkeypatch.setattr(learner_bootstrap, 'lead_min', lambda config: 0)
  cell, steps = CELLS[0]
  ages = offer_age.measure(config_of(steps), cell)
  assert not ages.reached(cell.far), ages


def test_offers_by_own_steps_without_refresh_are_old(monkeypatch):
  """Offers were made s own steps after the last, whatever t was."""

  monkeypatch.setattr(offers.View, 'moved', lambda self, *_: self)
  monkeypatch.setattr(snapshots, 'refresh', lambda core: None)
  monkeypatch.setattr(offers, 'lead_max', lambda config: 0)
  ages = offer_age.measure(config_of(480), CELLS[0][0])
  assert not ages.reached(False), ages


def test_the_table_has_a_row_for_each_cell():
  config = experiment.get_config('quicktest')
  config.study.update(steps=48, learners=(2,), fragments=(1, 24))
  report = offer_age.report(simulation.build(config), lambda line: None)
  [table] = report.parts
  assert [row[:5] for row in table.rows] == [
    ('near', 1, 2, 1, 1),
    ('near', 1, 2, 1, 24),
    ('0.7 steps', 4, 2, 1, 1),
    ('0.7 steps', 4, 2, 1, 24),
  ]
