# SPDX-License-Identifier: Apache-2.0
"""Rows by number: element i of a learner's dataset is row i of its data shard.

The text is cut into windows of `seq_len` + 1 tokens, each overlapping the next
by one token. A run has one endless order of windows, shuffled in each epoch.
Row r of it belongs to learner r mod M: learners never share a window, whichever
of them live, and however many rows each takes per step. So M learners of batch
B and one of batch M·B read the same windows in every step. How many rows a
learner has taken is the whole state of its dataset.

If text is read in large pieces (row groups), windows are shuffled in runs of
such a piece, and again within a few consecutive runs, so that few pieces are
needed at a time; at the end of an epoch, these may belong to it and to the next
one. In a mixture, each stream has an endless order of its own, and Grain draws
rows from them by their weights: periodically, so that with this order alone one
learner would get all rows of one stream. Hence they are shuffled once more.
"""

from collections.abc import Iterator

import grain
import numpy as np

from diloco.data.documents import Mixture
from diloco.data.text_windows import Tokens, Windows, run_of, stack

Dataset = grain.MapDataset  # Element i is row i, as `Windows` gives it.
ENDLESS = 1 << 62
MIXED = 1024  # Rows of a mixture that are shuffled together.
RUNS_SHUFFLED = 4  # Runs whose windows are shuffled together.
_SEED_MAX = 1 << 31  # Grain counts up from a seed, within 32 bits.


class _Unrolled(grain.MapDataset):
  """Maps indices of runs to the indices of their windows.

  Grain's own flat map may leave out elements, so that it cannot be followed by
  batching; runs all have one size.
  """

  def __init__(self, runs: grain.MapDataset, size: int):
    super().__init__(runs)
    self._size = size

  def __len__(self) -> int:
    return len(self._parent) * self._size

  def __getitem__(self, i):
    if isinstance(i, slice):
      return self.slice(i)
    run, within = divmod(i, self._size)
    return self._parent[run] * self._size + within


class _Dealt(grain.MapDataset):
  """Rows first, first + every, first + 2·every, … of an endless dataset."""

  def __init__(self, rows: grain.MapDataset, first: int, every: int):
    super().__init__(rows)
    self._first, self._every = first, every

  def __len__(self) -> int:
    return ENDLESS

  def __getitem__(self, i):
    if isinstance(i, slice):
      return self.slice(i)
    return self._parent[self._first + i * self._every]


def make_dataset(
  tokens: Tokens | Mixture, seq_len: int, learners: int, learner: int, seed: int
) -> Dataset:
  """Returns the endless rows of one learner; each epoch has its own order.

  Args:
    tokens: uint8, uint16 or int32, [length]; possibly a memory map or a stream
      that is read from files. It has a window (`text_windows.check_windows`).
    seq_len: L, predictions per row.
    learners: M, among whom the run's order is dealt.
    learner: its id. One that joins beyond M reads all windows, in an order of
      its own: those of the others are theirs whether or not they live.
    seed: Seed of the run.

  Returns:
    Element i, for any i ≥ 0, is a window of `Windows`. No window of an epoch is
    left out, except for those of an incomplete run.
  """
  streams = tokens.streams if isinstance(tokens, Mixture) else (tokens,)
  own = (learner + 1,) if learner >= learners else ()
  rows = [
    _rows(each, seq_len, _seed(seed, k, *own)) for k, each in enumerate(streams)
  ]
  if isinstance(tokens, Mixture):
    mixed = grain.MapDataset.mix(rows, tokens.weights)
    seed = _seed(seed, len(streams), *own)
    rows = [_shuffled(mixed, MIXED, seed)]
  return rows[0] if own else _Dealt(rows[0], learner, learners)


def _rows(tokens: Tokens, seq_len: int, seed: int) -> Dataset:
  """Returns the endless windows of one stream."""
  run = run_of(tokens, seq_len)
  windows = Windows(tokens, seq_len, run)
  if run == 1:
    return grain.MapDataset.source(windows).shuffle(seed=seed).repeat()
  runs = grain.MapDataset.source(range(len(windows) // run)).shuffle(seed=seed)
  numbers = _shuffled(_Unrolled(runs, run).repeat(), run * RUNS_SHUFFLED, seed)
  return numbers.map(windows.__getitem__)


def _shuffled(rows: Dataset, window: int, seed: int) -> Dataset:
  """Returns the rows, shuffled within each `window` of them."""
  return grain.experimental.WindowShuffleMapDataset(
    rows, window_size=window, seed=seed % _SEED_MAX
  )


def _seed(*numbers: int) -> int:
  return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def batch_at(dataset: Dataset, start: int, batch: int) -> dict[str, np.ndarray]:
  """Returns rows start … start + batch - 1, as `stack` does."""
  return stack([dataset[i] for i in range(start, start + batch)])


def batches(
  dataset: Dataset,
  start: int,
  batch: int,
  threads: int = 1,
  own: range | None = None,
) -> Iterator[dict[str, np.ndarray]]:
  """Yields `batch_at` of rows start, start + batch, …, read ahead.

  Args:
    threads: threads that read, each a batch at a time; two batches are buffered
      per thread. (Grain's default, 16 threads and 500 elements, is too much for
      several learners on one machine.)
    own: rows of each batch to read; None: all.
  """
  options = grain.ReadOptions(
    num_threads=threads, prefetch_buffer_size=2 * threads
  )
  rows = _Batches(dataset, start, batch, own or range(batch))
  return iter(rows.to_iter_dataset(options))


class _Batches(grain.MapDataset):
  """Element i has some rows of the batch that begins at start + i·batch."""

  def __init__(self, rows: Dataset, start: int, batch: int, own: range):
    super().__init__(rows)
    self._start, self._batch, self._own = start, batch, own

  def __len__(self) -> int:
    return ENDLESS

  def __getitem__(self, i):
    if isinstance(i, slice):
      return self.slice(i)
    first = self._start + i * self._batch + self._own.start
    return batch_at(self._parent, first, len(self._own))
