# SPDX-License-Identifier: Apache-2.0
"""The ages of what the lab merges, and how many learners a round has."""

import pytest

from diloco.config import run_config
from diloco.lab.run import train
from diloco.protocol.learner import bootstrap as learner_bootstrap
from diloco.run.spec import make_run_spec
from diloco.studies import offer_age
from experiments import lab_age


def _ages(fragments: int, overlap: int) -> offer_age.OfferAgeResult:
  config = lab_age.get_config('learners=4,steps=120')
  config.protocol.update(fragments=fragments, overlap_steps=overlap, quorum=1)
  trained = train(make_run_spec(run_config.build(config)))
  return offer_age.OfferAgeResult(
    trained.age_steps, trained.old_share, trained.participation, encodings=0.0
  )


@pytest.mark.parametrize('fragments,overlap', [(1, 1), (8, 1)])
def test_the_lab_reaches_the_aims_of_the_study(fragments, overlap):
  ages = _ages(fragments, overlap)
  assert ages.reached(far=False), ages


def test_without_a_lead_learners_are_late(monkeypatch):
  monkeypatch.setattr(learner_bootstrap, 'lead_min', lambda config: 0)
  ages = _ages(fragments=1, overlap=1)
  assert not ages.reached(far=False), ages
