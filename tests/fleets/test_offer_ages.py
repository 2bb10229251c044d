# SPDX-License-Identifier: Apache-2.0
"""Ages of merged offers, and what they were before offers kept the phase.

Learners of the same speed whose steps vary drift apart. An offer that misses
its round by a moment is merged nevertheless, and of the last boundary.
"""

import pytest

from diloco.protocol.learner import bootstrap as learner_bootstrap
from diloco.protocol.learner import offers
from tests.fleets.fleets import network_of, run

# Latency in steps, τ, M, K, P; and how many steps.
CELLS = [
  (0.01, 1, 4, 1, 1, 240),
  (0.01, 1, 4, 2, 1, 240),
  (0.01, 1, 2, 1, 2, 240),
  (0.01, 1, 4, 2, 8, 240),
  (0.01, 6, 4, 1, 24, 120),
  (0.7, 4, 4, 1, 4, 240),
  (0.7, 4, 4, 2, 8, 240),  # Two rounds are open, and a boundary has one copy.
  (0.01, 1, 8, 1, 24, 120),  # A round at each step.
  (0.01, 6, 8, 1, 8, 240),  # Rounds stay open for two steps.
]


def _are_young(latency_s, overlap, learners, quorum, fragments, steps) -> bool:
  network = network_of(
    fragments, latency_s=latency_s, encode_s=0.02, merge_s=0.05
  )
  found = run(
    float(steps), jitter=0.05, network=network, learners=learners,
    fragments=fragments, sync_every_steps=24, overlap_steps=overlap,
    quorum=quorum,
  ).record()  # fmt: skip
  return (
    found['age'] <= 0.8 and found['old'] <= 0.05
    and found['participation'] >= (0.95 if latency_s < 0.1 else 0.9)
  )  # fmt: skip


@pytest.mark.parametrize('cell', CELLS, ids=str)
def test_what_is_merged_is_of_the_last_boundary(cell):
  assert _are_young(*cell)


def test_a_learner_that_begins_without_a_lead_is_late_once(monkeypatch):
  monkeypatch.setattr(learner_bootstrap, 'min_ahead', lambda config: 0)
  assert not _are_young(*CELLS[0])


def test_offers_by_own_steps_without_refresh_are_old(monkeypatch):
  """Offers were made s own steps after the last, whatever t was."""
  monkeypatch.setattr(offers.View, 'moved', lambda self, *_: self)
  monkeypatch.setattr(offers, '_to_refresh', lambda core: None)
  monkeypatch.setattr(offers, 'max_ahead', lambda config: 0)
  assert not _are_young(*CELLS[0][:-1], 480)
