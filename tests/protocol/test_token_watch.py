# SPDX-License-Identifier: Apache-2.0
"""The token ledger of the swarm: what is planted is found, by either side."""

import pytest

from diloco.metrics import token_ledger
from diloco.protocol.learner import updates
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.values import replace_unchecked
from diloco.simulator import swarm as simulator_swarm
from diloco.simulator.invariants import Violation
from diloco.simulator.observer import TokenObserver
from diloco.simulator.scenario import draw

SEEDS = 20  # Every scenario merges; not every one overwrites.


def _forgets_what_it_overwrites(patch):
  original = updates._apply

  def apply(core, p, fragment):
    original(core, p, fragment)
    core.effects[-1] = replace_unchecked(core.effects[-1], overwritten_tokens=0)

  patch.setattr(updates, '_apply', apply)


def _record(patch, shares_of):
  """The record of what was published is another, for one round."""
  original = TokenObserver.at_syncer

  def at_syncer(self, syncer, event, effects):
    effects = [
      replace_unchecked(effect, shares=shares_of(effect.shares))
      if isinstance(effect, syncer_events.Publish) and effect.round == 1
      else effect
      for effect in effects
    ]
    original(self, syncer, event, effects)

  patch.setattr(TokenObserver, 'at_syncer', at_syncer)


def _loses_a_merge(patch):
  _record(patch, lambda shares: shares[1:])


def _records_a_merge_twice(patch):
  _record(patch, lambda shares: (*shares, shares[0]))


@pytest.mark.parametrize(
  'plant', [_forgets_what_it_overwrites, _loses_a_merge, _records_a_merge_twice]
)
def test_a_planted_fault_is_found(plant, monkeypatch):
  plant(monkeypatch)
  with pytest.raises(Violation, match='6: unexplained tokens'):
    for seed in range(SEEDS):
      simulator_swarm.Swarm(draw(seed)).run()


def test_tokens_are_lost_for_every_reason_and_none_is_unexplained():
  """Over so many scenarios; each balances by itself."""
  rows = []
  for seed in range(3 * SEEDS):
    scenario = simulator_swarm.Swarm(draw(seed))
    scenario.run()
    rows += scenario.observer.tokens.rows().values()
  assert token_ledger.unexplained(rows) == 0
  total = token_ledger.total(rows)
  assert total.merged > total.overwritten > 0
  reasons = {reason for reason, _ in total.lost}
  assert reasons >= {
    token_ledger.BOOTSTRAP,
    token_ledger.DIED,
    token_ledger.LEFT,
    token_ledger.QUARANTINED,
  }
