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

from diloco.data.documents import Mixture, TokenStream

Dataset = grain.MapDataset  # Element i is the batch at position i.
Tokens = np.ndarray | TokenStream
DTYPES = ('uint8', 'uint16', 'int32')
RUNS_SHUFFLED = 4  # Runs whose windows are shuffled together.
RUNS_MIN = 16  # Per shard; with fewer, the order would hardly be random.
_SEED_MAX = 1 << 31  # Grain counts up from a seed, within 32 bits.


class Windows:
  """The windows of one shard, in order.

  Number i is window shard + i·shards or, in runs, the windows of run shard +
  i·shards are consecutive; an incomplete run is left out.
  """

  def __init__(
    self, tokens: Tokens, seq_len: int, shards: int, shard: int, run: int = 1
  ):
    self._tokens = tokens
    self._seq_len = seq_len
    self._run = run
    self._runs = range(windows_in(tokens, seq_len) // run)[shard::shards]

  def __len__(self) -> int:
    return len(self._runs) * self._run

  def __getitem__(self, i: int) -> np.ndarray:
    """Returns int32 [seq_len + 1]."""
    run, within = divmod(i, self._run)
    start = (self._runs[run] * self._run + within) * self._seq_len
    return self._tokens[start : start + self._seq_len + 1].astype(np.int32)


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


def windows_in(tokens: Tokens, seq_len: int) -> int:
  """Returns how many complete windows the text has."""
  return max(0, (len(tokens) - 1) // seq_len)


def run_of(tokens: Tokens, seq_len: int, shards: int) -> int:
  """Returns the windows per run; 1 if each is read by itself."""
  if not isinstance(tokens, TokenStream):
    return 1
  most = windows_in(tokens, seq_len) // (shards * RUNS_MIN)
  return max(1, min(tokens.run_tokens // seq_len, most))


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
    ValueError: An argument is out of its range, or the shard does not have
      enough windows for one batch.
  """
  streams = tokens.streams if isinstance(tokens, Mixture) else (tokens,)
  for each in streams:
    _check_tokens(each, seq_len, batch)
  if shards < 1:
    raise ValueError(f'data: shards={shards}, must be at least 1')
  if not 0 <= shard < shards:
    raise ValueError(f'data: shard={shard}, must be from 0 to {shards - 1}')
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
    return rows[0].map(lambda row: _stack([row]))
  return rows[0].batch(batch, batch_fn=_stack)


def _rows(
  tokens: Tokens,
  seq_len: int,
  least: int,
  shards: int,
  shard: int,
  seeds: Sequence[int],
) -> grain.MapDataset:
  """Returns the endless windows of one shard of one stream."""
  windows = _windows(tokens, seq_len, least, shards, shard)
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


def _windows(
  tokens: Tokens, seq_len: int, least: int, shards: int, shard: int
) -> Windows:
  run = run_of(tokens, seq_len, shards)
  windows = Windows(tokens, seq_len, shards, shard, run)
  if len(windows) < least:
    # The last shard has the fewest windows; shards·least suffice for all.
    raise ValueError(
      f'data: {len(tokens)} tokens give shard {shard} of {shards} '
      f'{len(windows)} windows of seq_len={seq_len}, one batch needs {least}; '
      f'that takes {shards * least * seq_len + 1} tokens'
    )
  return windows


def batches(
  dataset: grain.MapDataset, start: int, threads: int = 1
) -> Iterator[dict[str, np.ndarray]]:
  """Yields elements `start`, start + 1, … of `dataset`, read ahead.

  Args:
    start: position of the first.
    threads: threads that read, each a batch at a time; two batches are buffered
      per thread. (Grain's default, 16 threads and 500 elements, is too much for
      several learners on one machine.)

  Raises:
    ValueError: `start` is negative.
  """
  if start < 0:
    raise ValueError(f'data: start={start}, must be at least 0')
  options = grain.ReadOptions(
    num_threads=threads, prefetch_buffer_size=2 * threads
  )
  iterator = iter(dataset.to_iter_dataset(options))
  grain.experimental.set_next_index(iterator, start)
  return iterator


def check_shards(
  tokens: Tokens | Mixture, seq_len: int, batch: int, shards: int
) -> None:
  """Checks that a text gives every shard a batch.

  Raises:
    ValueError: it is too short; says what is needed.
  """
  streams = tokens.streams if isinstance(tokens, Mixture) else (tokens,)
  for each in streams:  # The last shard has the fewest windows.
    _windows(
      each, seq_len, batch if len(streams) == 1 else 1, shards, shards - 1
    )


def heldout_shape(
  tokens: Tokens | Mixture, seq_len: int, batch: int, count: int
) -> tuple[int, int]:
  """Returns rows per batch and number of batches for which a text suffices.

  All of `batch` and `count` if possible; otherwise fewer batches and, if it has
  not even one, one with fewer rows. A `count` of 0 asks for all of the text,
  except for an incomplete batch.

  Raises:
    ValueError: it has no window at all; says what is needed.
  """
  streams = tokens.streams if isinstance(tokens, Mixture) else (tokens,)
  whole = sum(windows_in(stream, seq_len) for stream in streams) // batch
  shapes = [
    *((batch, fewer) for fewer in range(count or whole, 0, -1)),
    *((fewer, 1) for fewer in range(batch - 1, 0, -1)),
  ]
  for rows, batches_ in shapes:
    if all(
      windows_in(stream, seq_len) >= share
      for stream, share in heldout_shares(tokens, rows * batches_)
    ):
      return rows, batches_
  length = max(map(len, streams))
  raise ValueError(
    f'data: {length} held-out tokens hold no window of seq_len={seq_len}, '
    f'that takes {seq_len + 1}: hold out more, or make seq_len shorter'
  )


def heldout_batches(
  tokens: Tokens | Mixture, seq_len: int, batch: int, count: int
) -> list[dict[str, np.ndarray]]:
  """Returns `count` fixed batches, evenly spaced over the whole text.

  In a mixture, each stream has its share of them.

  Returns:
    A list of {'tokens': int32 [B, L+1]}; no prediction occurs twice.

  Raises:
    ValueError: An argument is out of its range, or the text has fewer than
      batch·count windows.
  """
  if count < 1:
    raise ValueError(f'data: count={count}, must be at least 1')
  rows = batch * count
  picked = []
  for stream, share in heldout_shares(tokens, rows):
    _check_tokens(stream, seq_len, batch)
    windows = windows_in(stream, seq_len)
    if windows < share:
      raise ValueError(
        f'data: {len(stream)} held-out tokens are {windows} windows of '
        f'seq_len={seq_len}, {count} batches of {batch} need {share}'
      )
    source = Windows(stream, seq_len, shards=1, shard=0)
    picked += [source[row * windows // share] for row in range(share)]
  return [_stack(picked[i : i + batch]) for i in range(0, rows, batch)]


def heldout_shares(
  tokens: Tokens | Mixture, rows: int
) -> list[tuple[Tokens, int]]:
  """Returns how many held-out rows each stream contributes."""
  if not isinstance(tokens, Mixture):
    return [(tokens, rows)]
  ends = np.cumsum(tokens.weights) / np.sum(tokens.weights) * rows
  bounds = [0, *np.rint(ends).astype(int).tolist()]
  return list(zip(tokens.streams, np.diff(bounds).tolist()))


def bytes_per_token(tokens: Tokens | Mixture) -> float:
  """Returns the average bytes per token; a weighted one for a mixture."""
  if isinstance(tokens, Mixture):
    each = [stream.bytes_per_token for stream in tokens.streams]
    return float(np.average(each, weights=tokens.weights))
  return tokens.bytes_per_token if isinstance(tokens, TokenStream) else 1.0


def _stack(windows: list[np.ndarray]) -> dict[str, np.ndarray]:
  return {'tokens': np.stack(windows)}


def _check_tokens(tokens: Tokens, seq_len: int, batch: int):
  if isinstance(tokens, np.ndarray) and (
    tokens.ndim != 1 or tokens.dtype.name not in DTYPES
  ):
    raise ValueError(
      f'data: tokens are {tokens.dtype.name} {list(tokens.shape)}, must be '
      f'one of {DTYPES} and 1-D'
    )
  if seq_len < 1:
    raise ValueError(f'data: seq_len={seq_len}, must be at least 1')
  if batch < 1:
    raise ValueError(f'data: batch={batch}, must be at least 1')
