# SPDX-License-Identifier: Apache-2.0
"""The token ledger balances, and says so where it does not."""

import pytest

from diloco.metrics import token_ledger
from diloco.metrics.token_ledger import (
  BOOTSTRAP,
  DIED,
  LEDGER,
  LEFT,
  RESTORED,
  SLICE,
)
from diloco.protocol.incarnation import incarnation_of

TOKENS = 10  # Per step.
FIRST, SECOND, THIRD = 7, 9, 11  # Processes.


def begin(process, step=0, parent=None):
  source = {'kind': 'seed', 'process': None, 'step': None}
  if parent is not None:
    source = {'kind': 'checkpoint', 'process': parent, 'step': step}
  return line('Begin', process, step, source=source)


def line(kind, process, step, **fields):
  return {
    'kind': kind, 'process': process, 'step': step, 'tokens': step * TOKENS,
    'time_s': 0.0, **fields
  }  # fmt: skip


def copied(process, step, handle):
  return line(
    'Snapshot', process, step, fragment=0, handle=handle, c_steps=1,
    c_tokens=TOKENS,
  )  # fmt: skip


def applied(process, step, handle, merged, overwritten, carry=True):
  return line(
    'Apply',
    process,
    step,
    fragment=0,
    carry=carry,
    handle=handle,
    merged_tokens=merged,
    overwritten_tokens=overwritten,
  )


def closed(version, *shares):
  """Returns a closed round; each share: process, handle, steps, copied at."""
  return {
    'kind': 'Publish',
    'fragment': 0,
    'version': version,
    'shares': [
      {
        'learner': 0,
        'incarnation': incarnation_of(process, 1),
        'handle': handle,
        'c_steps': steps,
        'c_tokens': steps * TOKENS,
        'step': step,
      }
      for process, handle, steps, step in shares
    ],
  }


def row(syncer, lines, last=None):
  """Returns the row of fragment 0 of learner 0.

  `last` is (process, step) of the last line of the metrics.
  """
  known = [(incarnation_of(last[0], 1), last[1] * TOKENS)] if last else []
  return token_ledger.rows(syncer, {0: lines}, {0: known}, 1)[0, 0]


def good():
  """Six steps: two merged, one more, two overwritten, one pending."""
  syncer = [closed(1, (FIRST, 1, 2, 2)), closed(2, (FIRST, 2, 1, 3))]
  learner = [
    begin(FIRST),
    copied(FIRST, 2, 1),
    applied(FIRST, 2, 1, 20, 0),
    copied(FIRST, 3, 2),
    applied(FIRST, 3, 2, 10, 0),
    applied(FIRST, 5, 0, 0, 20, carry=False),
    line('Cease', FIRST, 6),
  ]
  return syncer, learner


def test_a_good_run_balances():
  found = row(*good())
  assert found == token_ledger.TokenCounts(60, 30, 20, (), 10)
  assert found.unexplained == 0


def test_steps_that_only_the_memory_of_slices_has_are_trained_all_the_same():
  """The first process has written down one step less than others go on from."""
  second = begin(SECOND, 3)
  second['source'] = {'kind': 'slice', 'process': FIRST, 'step': 3}
  found = row(
    [closed(1, (FIRST, 1, 2, 2))],
    [
      begin(FIRST),
      copied(FIRST, 2, 1),
      applied(FIRST, 2, 1, 20, 0),
      second,
      applied(SECOND, 5, 0, 0, 30, carry=False),
    ],
  )
  assert found == token_ledger.TokenCounts(50, 20, 30, (), 0)


def test_a_slice_may_come_back_with_more_steps_than_the_others_since_made():
  """The second process begins from a checkpoint, as the memory is away; the
  third from that memory. What the second made and nobody merged is lost.
  """
  third = begin(THIRD, 5)
  third['source'] = {'kind': 'slice', 'process': FIRST, 'step': 5}
  found = row(
    [closed(1, (FIRST, 1, 2, 2)), closed(2, (SECOND, 1, 1, 3))],
    [
      begin(FIRST),
      copied(FIRST, 2, 1),
      applied(FIRST, 2, 1, 20, 0),
      line('Save', FIRST, 2),
      begin(SECOND, 2, FIRST),
      copied(SECOND, 3, 1),
      applied(SECOND, 3, 1, 10, 0),
      line('Progress', SECOND, 4),
      third,
      applied(THIRD, 6, 0, 0, 40, carry=False),
    ],
  )
  assert found == token_ledger.TokenCounts(80, 30, 40, ((SLICE, 10),), 0)


def test_a_merge_that_the_syncer_s_record_lacks_is_found():
  syncer, learner = good()
  assert row(syncer[:1], learner).unexplained == 10


def test_a_merge_that_stands_twice_is_found():
  syncer, learner = good()
  [share] = syncer[0]['shares']
  syncer[1]['shares'].append(share)
  assert row(syncer, learner).unexplained == -20


def test_a_merge_that_no_learner_offered_is_found():
  syncer, learner = good()
  assert row([*syncer, closed(3, (SECOND, 5, 4, 4))], learner).unexplained < 0


def test_a_merge_without_a_learner_s_tape_is_found():
  [found] = token_ledger.rows(good()[0], {}, {}, 1).values()
  assert found.unexplained == -30


def test_an_overwrite_that_is_not_told_of_is_found():
  syncer, learner = good()
  learner[5]['overwritten_tokens'] = 0
  assert row(syncer, learner).unexplained == 20


def test_another_count_on_one_side_is_found():
  syncer, learner = good()
  syncer[1]['shares'][0]['c_tokens'] = 9
  assert row(syncer, learner).unexplained == 1


def test_an_apply_that_is_not_on_the_tape_is_found_by_the_next():
  syncer, learner = good()
  assert row(syncer, [*learner[:4], *learner[5:]]).unexplained != 0


def killed():
  """Saved at 4, killed at 8 with an offer of 2 to 6; the restart trains 3."""
  learner = [
    begin(FIRST),
    copied(FIRST, 2, 1),
    applied(FIRST, 2, 1, 20, 0),
    line('Save', FIRST, 4),
    copied(FIRST, 6, 2),
    begin(SECOND, 4, FIRST),
    line('Cease', SECOND, 7),
  ]
  return [closed(1, (FIRST, 1, 2, 2))], learner


def test_what_a_checkpoint_has_is_pending_again():
  syncer, learner = killed()
  found = row(syncer, learner, (FIRST, 8))
  # 8 and 3 steps: 2 merged, 4 died, 2 of the checkpoint and 3 pending.
  assert found == token_ledger.TokenCounts(110, 20, 0, ((DIED, 40),), 50)
  assert found.unexplained == 0


def test_what_was_merged_after_a_death_is_not_lost_nor_pending():
  syncer, learner = killed()
  syncer.append(closed(2, (FIRST, 2, 4, 6)))
  found = row(syncer, learner, (FIRST, 8))
  assert found == token_ledger.TokenCounts(110, 60, 0, ((DIED, 20),), 30)
  assert found.unexplained == 0


def test_what_a_restart_overwrites_of_its_checkpoint_counts_once():
  """The restarted process does not know that a round has merged it."""
  syncer, learner = killed()
  syncer.append(closed(2, (FIRST, 2, 4, 6)))
  taken = applied(SECOND, 4, 0, 0, 20, carry=False)
  found = row(syncer, [*learner[:5], taken, *learner[5:]], (FIRST, 8))
  assert found == token_ledger.TokenCounts(110, 60, 0, ((DIED, 20),), 30)


def test_what_a_bootstrap_overwrites_has_its_reason():
  syncer, learner = killed()
  taken = applied(SECOND, 4, 0, 0, 20, carry=False)
  found = row(syncer, [*learner[:5], taken, *learner[5:]], (FIRST, 8))
  assert found == token_ledger.TokenCounts(
    110, 20, 0, ((BOOTSTRAP, 20), (DIED, 40)), 30
  )
  assert found.unexplained == 0


def test_one_that_starts_from_the_seed_lets_go_of_all():
  syncer, learner = good()
  found = row(syncer, [*learner, begin(SECOND), line('Cease', SECOND, 2)])
  assert found == token_ledger.TokenCounts(80, 30, 20, ((LEFT, 10),), 20)


def test_what_a_lost_ledger_had_merged_is_lost():
  """Version 2 is another than the learner had taken in."""
  syncer, learner = good()
  found = row([*syncer, closed(2)], learner)
  assert found == token_ledger.TokenCounts(60, 20, 20, ((LEDGER, 10),), 10)
  assert found.unexplained == 0


@pytest.mark.parametrize('sign', [1, -1])
def test_learners_do_not_make_up_for_each_other(sign):
  rows = [
    token_ledger.TokenCounts(10, 10 + x, 0, (), 0)
    for x in (sign * 3, -sign * 3)
  ]
  assert token_ledger.total(rows).unexplained == 0
  assert token_ledger.unexplained(rows) == 6


@pytest.mark.parametrize('merged_late', (False, True))
def test_interpolated_what_a_checkpoint_had_pending_is_lost(merged_late):
  """The restarted process can't tell it from what was mixed in."""
  syncer, learner = killed()
  if merged_late:  # Of the two steps at the checkpoint, and two that died.
    syncer.append(closed(2, (FIRST, 2, 4, 6)))
  known = [(incarnation_of(FIRST, 1), 8 * TOKENS)]
  [found] = token_ledger.rows(
    syncer, {0: learner}, {0: known}, 1, blend='interpolate'
  ).values()
  lost = ((DIED, 20),) if merged_late else ((DIED, 40), (RESTORED, 20))
  assert found == token_ledger.TokenCounts(
    110, 60 if merged_late else 20, 0, lost, 30
  )
  assert found.unexplained == 0
