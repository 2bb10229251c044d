# SPDX-License-Identifier: Apache-2.0
"""Batches by position: element i of a learner's dataset is its batch i.

The text is cut into windows of `seq_len` + 1 tokens, each overlapping the next
by one token. Windows are dealt to a fixed number of logical data shards, one
per learner id, so that learners never share a window, whichever of them live. A
position alone is the whole state of a dataset.

If text is read in large pieces (row groups), windows are dealt and shuffled in
runs of such a piece, and again within a few consecutive runs, so that few
pieces are needed at a time; at the end of an epoch, these may belong to it and
to the next one. In a mixture, each stream is a dataset of its own, endless, and
Grain draws rows from them by their weights.
"""

from collections.abc import Iterator, Sequence

import grain
import numpy as np

from diloco.data.documents import Mixture
from diloco.data.text_windows import Tokens, run_of, shard_windows, stack

Dataset = grain.MapDataset  # Element i is the batch at position i.
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


def make_dataset(
  tokens: Tokens | Mixture,
  seq_len: int,
  batch: int,
  shards: int,
  shard: int,
  seed: int,
) -> grain.MapDataset:
  """Returns the endless batches of one shard, each epoch in an order of its
  own.

  Args:
    tokens: uint8, uint16 or int32, [length]; possibly a memory map or a stream
      that is read from files.
    seq_len: L, predictions per row.
    batch: B, rows.
    shards: Number of logical data shards; fixed, at least as many as learners.
    seed: Seed of the run; every shard is shuffled differently.

  Returns:
    Element i, for any i ≥ 0, is {'tokens': int32 [B, L+1]}. A batch may begin
    in one epoch and end in the next: no window is left out, except for those of
    an incomplete run.

  Raises:
    ValueError: The shard does not have enough windows for one batch.
  """
  streams = tokens.streams if isinstance(tokens, Mixture) else (tokens,)
  least = batch if len(streams) == 1 else 1
  # Each is shuffled differently.
  numbers = [(), *((k,) for k in range(1, len(streams)))]
  rows = [
    _rows(each, seq_len, least, shards, shard, (seed, shard, *number))
    for each, number in zip(streams, numbers)
  ]
  if isinstance(tokens, Mixture):
    rows = [grain.MapDataset.mix(rows, tokens.weights)]
  # Grain's own batch reports an invalid length for endless rows.
  if batch == 1:
    return rows[0].map(lambda row: stack([row]))
  return rows[0].batch(batch, batch_fn=stack)


def _rows(
  tokens: Tokens,
  seq_len: int,
  least: int,
  shards: int,
  shard: int,
  seeds: Sequence[int],
) -> grain.MapDataset:
  """Returns the endless windows of one shard of one stream."""
  windows = shard_windows(tokens, seq_len, least, shards, shard)
  run = run_of(tokens, seq_len, shards)
  seed = int(np.random.SeedSequence(seeds).generate_state(1)[0])
  if run == 1:
    return grain.MapDataset.source(windows).shuffle(seed=seed).repeat()
  runs = grain.MapDataset.source(range(len(windows) // run)).shuffle(seed=seed)
  return grain.experimental.WindowShuffleMapDataset(
    _Unrolled(runs, run).repeat(),
    window_size=run * RUNS_SHUFFLED,
    seed=seed % _SEED_MAX,
  ).map(windows.__getitem__)


def batches(
  dataset: grain.MapDataset, start: int, threads: int = 1
) -> Iterator[dict[str, np.ndarray]]:
  """Yields elements `start`, start + 1, … of `dataset`, read ahead.

  Args:
    start: position of the first.
    threads: threads that read, each a batch at a time; two batches are buffered
      per thread. (Grain's default, 16 threads and 500 elements, is too much for
      several learners on one machine.)
  """
  options = grain.ReadOptions(
    num_threads=threads, prefetch_buffer_size=2 * threads
  )
  iterator = iter(dataset.to_iter_dataset(options))
  grain.experimental.set_next_index(iterator, start)
  return iterator
