# SPDX-License-Identifier: Apache-2.0
"""Batches by position: element i of a learner's dataset is its batch i.

The text is cut into windows of `seq_len` + 1 tokens, each one token over the
next. Windows are dealt to a fixed number of logical shards, one per learner
id, so that learners never share a window whoever else lives. A position alone
is the whole state of a dataset.
"""

from collections.abc import Iterator

import grain
import numpy as np

Dataset = grain.MapDataset  # Element i is the batch at position i.
DTYPES = ('uint8', 'uint16', 'int32')

# Three learners on a laptop: the default of Grain is 16 threads, 500 elements.
_READ = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)


class Windows:
  """The windows of one shard: number i of it is number shard + i·shards."""

  def __init__(self, tokens: np.ndarray, seq_len: int, shards: int, shard: int):
    self._tokens = tokens
    self._seq_len = seq_len
    self._numbers = range(windows_in(tokens, seq_len))[shard::shards]

  def __len__(self) -> int:
    return len(self._numbers)

  def __getitem__(self, i: int) -> np.ndarray:
    """int32 [seq_len + 1]."""
    start = self._numbers[i] * self._seq_len
    return self._tokens[start : start + self._seq_len + 1].astype(np.int32)


def windows_in(tokens: np.ndarray, seq_len: int) -> int:
  """How many whole windows the text has; a rest is left out."""
  return max(0, (len(tokens) - 1) // seq_len)


def make_dataset(
  tokens: np.ndarray,
  seq_len: int,
  batch: int,
  shards: int,
  shard: int,
  seed: int,
) -> grain.MapDataset:
  """The endless batches of one shard, each epoch in an order of its own.

  Args:
    tokens: uint8, uint16 or int32, [length]; a memory map will do.
    seq_len: L, predictions per row.
    batch: B, rows.
    shards: Logical shards of the run; fixed, at least as many as learners.
    shard: Which of them, from 0.
    seed: Of the run; every shard is shuffled differently.

  Returns:
    Element i, for any i ≥ 0, is {'tokens': int32 [B, L+1]}. A batch may
    begin in one epoch and end in the next: no window is left out.

  Raises:
    ValueError: An argument is out of its range, or the shard has not enough
      windows for one batch.
  """
  _check_tokens(tokens, seq_len, batch)
  if shards < 1:
    raise ValueError(f'data: shards={shards}, must be at least 1')
  if not 0 <= shard < shards:
    raise ValueError(f'data: shard={shard}, must be from 0 to {shards - 1}')
  windows = Windows(tokens, seq_len, shards, shard)
  if len(windows) < batch:
    # The last shard has the fewest windows, shards·batch suffice for all.
    raise ValueError(
      f'data: {len(tokens)} tokens give shard {shard} of {shards} '
      f'{len(windows)} windows of seq_len={seq_len}, one batch needs {batch}; '
      f'that takes {shards * batch * seq_len + 1} tokens'
    )
  shuffle_seed = np.random.SeedSequence([seed, shard]).generate_state(1)[0]
  return (
    grain.MapDataset.source(windows)
    .shuffle(seed=int(shuffle_seed))
    .repeat()
    .batch(batch, batch_fn=_stack)
  )


def batches(
  dataset: grain.MapDataset, start: int
) -> Iterator[dict[str, np.ndarray]]:
  """Elements `start`, start + 1, … of `dataset`, read ahead by one thread.

  Raises:
    ValueError: `start` is negative.
  """
  if start < 0:
    raise ValueError(f'data: start={start}, must be at least 0')
  iterator = iter(dataset.to_iter_dataset(_READ))
  grain.experimental.set_next_index(iterator, start)
  return iterator


def heldout_batches(
  tokens: np.ndarray, seq_len: int, batch: int, count: int
) -> list[dict[str, np.ndarray]]:
  """`count` fixed batches, their windows evenly spaced over the whole text.

  Returns:
    A list of {'tokens': int32 [B, L+1]}; no prediction occurs twice.

  Raises:
    ValueError: An argument is out of its range, or the text has fewer than
      batch·count windows.
  """
  _check_tokens(tokens, seq_len, batch)
  if count < 1:
    raise ValueError(f'data: count={count}, must be at least 1')
  windows = windows_in(tokens, seq_len)
  rows = batch * count
  if windows < rows:
    raise ValueError(
      f'data: {len(tokens)} held-out tokens are {windows} windows of '
      f'seq_len={seq_len}, {count} batches of {batch} need {rows}'
    )
  source = Windows(tokens, seq_len, shards=1, shard=0)
  picked = [source[row * windows // rows] for row in range(rows)]
  return [_stack(picked[i : i + batch]) for i in range(0, rows, batch)]


def _stack(windows: list[np.ndarray]) -> dict[str, np.ndarray]:
  return {'tokens': np.stack(windows)}


def _check_tokens(tokens: np.ndarray, seq_len: int, batch: int):
  if tokens.ndim != 1 or tokens.dtype.name not in DTYPES:
    raise ValueError(
      f'data: tokens are {tokens.dtype.name} {list(tokens.shape)}, must be '
      f'one of {DTYPES} and 1-D'
    )
  if seq_len < 1:
    raise ValueError(f'data: seq_len={seq_len}, must be at least 1')
  if batch < 1:
    raise ValueError(f'data: batch={batch}, must be at least 1')
