# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the estimates of pulls; the tests of pace find them.

They break no invariant: they show in how often which learners are merged.
"""

import pytest

from diloco.protocol.syncer import pulls
from diloco.protocol.syncer.state import SyncerState
from diloco.protocol.timeouts import TransferTime
from tests.protocol import test_uneven


def _averages_all_pulls(patch):
  """Plants one mean for all learners and all sizes."""

  def transfer_time(self, learner):
    del learner
    return self.transfers.get(0, TransferTime())

  def measure(state, learner, nbytes, took_s):
    del nbytes
    time = state.transfer_time(learner)
    state.resting.pop(learner, None)
    state.transfers[0] = time.add(1, took_s)

  patch.setattr(SyncerState, 'transfer_time', transfer_time)
  patch.setattr(pulls, '_measure', measure)
  patch.setattr(pulls, '_note_failure', lambda *_: None)
  patch.setattr(TransferTime, 'usual_s', lambda self, nbytes: self.took_s)


def _learns_nothing_from_failures(patch):
  patch.setattr(TransferTime, 'raised', lambda self, *_: self)


def _counts_on_who_has_rested(patch):
  def quorum_now(self):
    awake = [m for m in self.live() if not self.rests(m)]
    return max(1, min(self.config.quorum, len(awake)))

  patch.setattr(SyncerState, 'quorum_now', quorum_now)


def _one_hanging_path():
  test_uneven.test_one_hanging_path_leaves_the_others_their_rounds(8, 0.95)


_slow = test_uneven.test_one_whose_pulls_take_thirty_times_as_long_is_merged
_large = test_uneven.test_a_fragment_ten_times_as_large_costs_nobody_its_part
_slower = (
  test_uneven.test_a_link_that_becomes_nine_times_slower_is_pulled_from_again
)


@pytest.mark.parametrize(
  'plant,all_is_well,words',
  [
    (_averages_all_pulls, _slow, '_participation'),
    (_averages_all_pulls, _large, 'len|kinds'),
    (_learns_nothing_from_failures, _slower, 'len|_participation'),
    (_counts_on_who_has_rested, _one_hanging_path, '_longest_gap_s'),
  ],
)
def test_a_planted_fault_of_pulls_is_found(
  plant, all_is_well, words, monkeypatch
):
  plant(monkeypatch)
  with pytest.raises(AssertionError, match=words):
    all_is_well()
