# SPDX-License-Identifier: Apache-2.0
"""Batches by position: nothing shared, nothing lost, any place to resume."""

import contextlib
import itertools

import numpy as np
import pytest

from diloco.data import pipeline, text_windows

SEQ_LEN, BATCH, SHARDS = 5, 3, 4
# Each token is its own place in the text, so windows can be told apart.
TOKENS = np.arange(5 * 50 + 3, dtype=np.int32)


def _dataset(shard=1, seed=0, tokens=TOKENS, shards=SHARDS):
  return pipeline.make_dataset(tokens, SEQ_LEN, BATCH, shards, shard, seed)


def _rows(dataset, count):
  """The first tokens of the first `count` windows that come."""
  batches = -(-count // BATCH)
  rows = np.concatenate([dataset[i]['tokens'] for i in range(batches)])
  return rows[:count, 0].tolist()


def _epoch(shard):
  return len(range(text_windows.windows_in(TOKENS, SEQ_LEN))[shard::SHARDS])


def test_a_batch_is_windows_of_one_token_more():
  tokens = _dataset()[0]['tokens']
  assert tokens.shape == (BATCH, SEQ_LEN + 1)
  assert tokens.dtype == np.int32
  np.testing.assert_array_equal(np.diff(tokens, axis=1), 1)
  np.testing.assert_array_equal(tokens[:, 0] % SEQ_LEN, 0)


def test_shards_are_disjoint_and_cover_the_text():
  starts = [_rows(_dataset(shard), _epoch(shard)) for shard in range(SHARDS)]
  together = sorted(itertools.chain(*starts))
  assert together == list(range(0, 250, SEQ_LEN))


def test_windows_predict_every_token_once():
  windows = text_windows.Windows(TOKENS, SEQ_LEN, shards=1, shard=0)
  predicted = np.concatenate([windows[i][1:] for i in range(len(windows))])
  np.testing.assert_array_equal(predicted, TOKENS[1:251])


@pytest.mark.parametrize('shard', range(SHARDS))
def test_epochs_are_different_orders_of_the_same_windows(shard):
  size = _epoch(shard)
  rows = _rows(_dataset(shard), 3 * size)
  epochs = [rows[i : i + size] for i in range(0, 3 * size, size)]
  assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
  assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize('start', [0, 1, 4, 17, 1000])
def test_any_position_can_be_resumed(start):
  dataset = _dataset()
  with contextlib.closing(pipeline.batches(dataset, start)) as resumed:
    for position in range(start, start + 6):
      np.testing.assert_array_equal(
        next(resumed)['tokens'], dataset[position]['tokens']
      )


@pytest.mark.parametrize('start', [0, 17])
def test_a_batch_of_one_row_is_read_as_any(start):
  dataset = pipeline.make_dataset(TOKENS, SEQ_LEN, 1, SHARDS, 1, 0)
  rows = np.concatenate([_dataset()[i]['tokens'] for i in range(start + 2)])
  with contextlib.closing(pipeline.batches(dataset, start)) as resumed:
    for position in range(start, start + 4):
      found = next(resumed)['tokens']
      np.testing.assert_array_equal(found, dataset[position]['tokens'])
      np.testing.assert_array_equal(found, rows[position : position + 1])


def test_the_order_is_the_same_in_every_version():
  # Of Grain and of NumPy: learners may run different ones.
  golden = [25, 45, 225, 105, 185, 145]
  assert _rows(_dataset(), 6) == golden, (
    'The order of the data changed: old runs resume with other batches.'
  )


def test_seeds_and_shards_shuffle_differently():
  orders = {
    (seed, shard): [
      start // SEQ_LEN // SHARDS for start in _rows(_dataset(shard, seed), 12)
    ]
    for seed in (0, 1)
    for shard in (0, 1)
  }
  for one, other in itertools.combinations(orders.values(), 2):
    assert one != other


def test_a_text_just_long_enough_is_enough():
  enough = SHARDS * BATCH * SEQ_LEN + 1
  for shard in range(SHARDS):
    assert _dataset(shard, tokens=TOKENS[:enough])[0]['tokens'].shape[0] == 3
  text = (
    '60 tokens give shard 3 of 4 2 windows of seq_len=5, one batch needs 3; '
    'that takes 61 tokens'
  )
  with pytest.raises(ValueError, match=text):
    _dataset(3, tokens=TOKENS[: enough - 1])


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


def test_every_shard_must_have_a_batch():
  text_windows.check_shards(TOKENS, SEQ_LEN, 12, SHARDS)
  needs = r'12 windows .* needs 13; that takes 261 tokens'
  with pytest.raises(ValueError, match=needs):
    text_windows.check_shards(TOKENS, SEQ_LEN, 13, SHARDS)


def test_a_count_of_zero_is_all_of_the_heldout_text():
  tokens = np.arange(1000, dtype=np.int32) % 251
  rows, count = text_windows.heldout_shape(tokens, 8, 4, 0)
  windows = text_windows.windows_in(tokens, 8)
  assert (rows, count) == (4, windows // 4)
  batches = text_windows.heldout_batches(tokens, 8, rows, count)
  seen = {batch['tokens'][i, 0] for batch in batches for i in range(rows)}
  starts = [batch['tokens'].tobytes() for batch in batches]
  assert len(starts) == len(set(starts)) == count and len(seen) > 100
