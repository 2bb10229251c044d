# SPDX-License-Identifier: Apache-2.0
"""Rows by number: nothing shared, nothing lost, any place to resume."""

import contextlib

import numpy as np
import pytest

from diloco.data import pipeline, text_windows

SEQ_LEN, BATCH, LEARNERS = 5, 3, 4
# Each token is its own place in the text, so windows can be told apart.
TOKENS = np.arange(5 * 50 + 3, dtype=np.int32)
WINDOWS = 50
GOLDEN = [175, 225, 85, 75, 125, 115]  # Of learner 1 of 4, seed 0.


def _dataset(learner=1, seed=0, learners=LEARNERS):
  return pipeline.make_dataset(TOKENS, SEQ_LEN, learners, learner, seed)


def _starts(dataset, first, stop):
  """The first tokens of rows first … stop - 1."""
  return [int(dataset[i][0]) for i in range(first, stop)]


def test_a_row_is_a_window_of_one_token_more():
  batch = pipeline.batch_at(_dataset(), 7, BATCH)['tokens']
  assert batch.shape == (BATCH, SEQ_LEN + 1)
  assert batch.dtype == np.int32
  np.testing.assert_array_equal(np.diff(batch, axis=1), 1)
  np.testing.assert_array_equal(batch[:, 0] % SEQ_LEN, 0)


def test_windows_predict_every_token_once():
  windows = text_windows.Windows(TOKENS, SEQ_LEN)
  predicted = np.concatenate([windows[i][1:] for i in range(len(windows))])
  np.testing.assert_array_equal(predicted, TOKENS[1:251])


@pytest.mark.parametrize('learners', [1, 2, 3, 4, 7])
def test_every_number_of_learners_reads_the_same_order(learners):
  """Row r of a step of all goes to learner r mod M, whatever their batch."""
  one = _starts(_dataset(0, learners=1), 0, 3 * WINDOWS)
  dealt = [
    _starts(_dataset(m, learners=learners), 0, WINDOWS) for m in range(learners)
  ]
  for r, start in enumerate(one[: learners * WINDOWS]):
    assert dealt[r % learners][r // learners] == start, r


def test_learners_share_no_window_of_an_epoch_and_leave_none_out():
  one = _starts(_dataset(0, learners=1), 0, 3 * WINDOWS)
  epochs = [one[i : i + WINDOWS] for i in range(0, 3 * WINDOWS, WINDOWS)]
  for epoch in epochs:
    assert sorted(epoch) == list(range(0, 250, SEQ_LEN))
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_learner_beyond_m_reads_all_in_an_order_of_its_own():
  orders = [
    _starts(_dataset(0, learners=1), 0, WINDOWS),
    _starts(_dataset(LEARNERS), 0, WINDOWS),
    _starts(_dataset(LEARNERS + 1), 0, WINDOWS),
  ]
  for order in orders:
    assert sorted(order) == list(range(0, 250, SEQ_LEN))
  assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize('start', [0, 1, 4, 17, 1000])
@pytest.mark.parametrize('batch', [1, 2, 8])
def test_any_row_can_be_resumed_from(start, batch):
  dataset = _dataset()
  with contextlib.closing(pipeline.batches(dataset, start, batch)) as resumed:
    for i in range(6):
      expected = pipeline.batch_at(dataset, start + i * batch, batch)
      found = next(resumed)
      np.testing.assert_array_equal(found['tokens'], expected['tokens'])


@pytest.mark.parametrize('threads', [1, 3])
def test_a_host_reads_its_own_rows_of_each_batch(threads):
  dataset, own = _dataset(), range(2, 5)
  batches = pipeline.batches(dataset, 17, 8, threads, own)
  with contextlib.closing(batches):
    for i in range(4):
      whole = pipeline.batch_at(dataset, 17 + 8 * i, 8)['tokens']
      np.testing.assert_array_equal(next(batches)['tokens'], whole[2:5])


def test_the_order_is_the_same_in_every_version():
  # Of Grain and of NumPy: learners may run different ones.
  assert _starts(_dataset(), 0, 6) == GOLDEN, (
    'The order of the data changed: old runs resume with other rows.'
  )


def test_seeds_shuffle_differently():
  assert _starts(_dataset(), 0, 12) != _starts(_dataset(seed=1), 0, 12)


def test_heldout_batches_are_spread_over_the_text():
  made = text_windows.heldout_batches(TOKENS, SEQ_LEN, batch=2, count=5)
  assert [batch['tokens'].shape for batch in made] == [(2, 6)] * 5
  starts = np.concatenate([batch['tokens'][:, 0] for batch in made])
  np.testing.assert_array_equal(starts, np.arange(10) * 25)


@pytest.mark.parametrize(
  ('asked', 'found'),
  [
    ((2, 5), (2, 5)),
    ((10, 9), (10, 5)),
    ((17, 3), (17, 2)),
    ((64, 4), (50, 1)),
  ],
)
def test_of_heldout_text_is_taken_what_there_is(asked, found):
  """Fewer batches; fewer rows only where there is not one whole batch."""
  assert text_windows.heldout_shape(TOKENS, SEQ_LEN, *asked) == found
  made = text_windows.heldout_batches(TOKENS, SEQ_LEN, *found)
  shapes = [batch['tokens'].shape for batch in made]
  assert shapes == [(found[0], SEQ_LEN + 1)] * found[1]


def test_without_a_heldout_window_nothing_is_evaluated():
  text = '5 held-out tokens hold no window of seq_len=5, that takes 6'
  with pytest.raises(ValueError, match=text):
    text_windows.heldout_shape(TOKENS[:5], SEQ_LEN, 2, 5)


def test_every_learner_must_have_a_batch():
  text_windows.check_windows(TOKENS, SEQ_LEN, 12, LEARNERS)
  needs = r'50 windows .* needs 52; that takes 261 tokens'
  with pytest.raises(ValueError, match=needs):
    text_windows.check_windows(TOKENS, SEQ_LEN, 13, LEARNERS)
