# SPDX-License-Identifier: Apache-2.0
"""The ages of what the lab merges, and how many learners a round has."""

import pytest

from diloco.config import run_config
from diloco.lab.run import train
from diloco.protocol.learner import bootstrap as learner_bootstrap
from diloco.run.spec import make_run_spec
from experiments import lab_age


def _are_young(fragments: int, overlap: int) -> bool:
  config = lab_age.get_config('learners=4,steps=120')
  config.protocol.update(fragments=fragments, overlap_steps=overlap, quorum=1)
  trained = train(make_run_spec(run_config.build(config)))
  return (
    trained.age_steps <= 0.8
    and trained.old_share <= 0.05
    and trained.participation >= 0.95
  )


@pytest.mark.parametrize('fragments,overlap', [(1, 1), (8, 1)])
def test_what_the_lab_merges_is_of_the_last_boundary(fragments, overlap):
  assert _are_young(fragments, overlap)


def test_without_a_lead_learners_are_late(monkeypatch):
  monkeypatch.setattr(learner_bootstrap, 'lead_min', lambda config: 0)
  assert not _are_young(fragments=1, overlap=1)
