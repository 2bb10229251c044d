# SPDX-License-Identifier: Apache-2.0
"""The text as windows of tokens.

Numpy alone: a process that trains nothing, such as the syncer, checks the text
without importing Grain.
"""

import numpy as np

from diloco.data.dialogues import split_signed
from diloco.data.documents import Mixture, TokenStream

Tokens = np.ndarray | TokenStream
RUNS_MIN = 64  # With fewer, the order would hardly be random.
# Of a batch, each int32 [B, L+1]: the first of them, as many as a row has.
KEYS = ('tokens', 'segments', 'counted')


class Windows:
  """The windows of a text, in order; an incomplete run is left out."""

  def __init__(self, tokens: Tokens, seq_len: int, run: int = 1):
    self._tokens = tokens
    self._seq_len = seq_len
    self._count = windows_in(tokens, seq_len) // run * run

  def __len__(self) -> int:
    return self._count

  def __getitem__(self, i: int) -> np.ndarray:
    """Returns int32 [seq_len + 1]; or [2, …], with segments below, if tokens
    of documents are kept apart; or [3, …], with 1 below for what counts.
    """
    start = i * self._seq_len
    stop = start + self._seq_len + 1
    tokens = self._tokens[start:stop].astype(np.int32)
    if not isinstance(self._tokens, TokenStream):
      return tokens
    apart, masked = self._tokens.apart, self._tokens.masked
    if not (apart or masked):
      return tokens
    segments = np.zeros_like(tokens)
    if apart:
      segments = self._tokens.segments(start, stop)
    if not masked:
      return np.stack([tokens, segments])
    tokens, counted = split_signed(tokens)
    return np.stack([tokens, segments, counted])


def windows_in(tokens: Tokens, seq_len: int) -> int:
  """Returns how many complete windows the text has."""
  return max(0, (len(tokens) - 1) // seq_len)


def run_of(tokens: Tokens, seq_len: int) -> int:
  """Returns the windows per run; 1 if each is read by itself."""
  if not isinstance(tokens, TokenStream):
    return 1
  most = windows_in(tokens, seq_len) // RUNS_MIN
  return max(1, min(tokens.run_tokens // seq_len, most))


def check_windows(
  tokens: Tokens | Mixture, seq_len: int, batch: int, ids: int
) -> None:
  """Checks that a text has a batch for each learner id; a mixture, a window.

  Raises:
    ValueError: it is too short; says what is needed.
  """
  streams = tokens.streams if isinstance(tokens, Mixture) else (tokens,)
  needed = batch * ids if len(streams) == 1 else 1
  for each in streams:
    windows = windows_in(each, seq_len)
    if windows < needed:
      raise ValueError(
        f'data: {len(each)} tokens are {windows} windows of seq_len={seq_len}, '
        f'one batch of each of {ids} learners needs {needed}; that takes '
        f'{needed * seq_len + 1} tokens'
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

  Args:
    batch, count: for which the text suffices, as `heldout_shape` says.

  Returns:
    A list of {'tokens': int32 [B, L+1]}; no prediction occurs twice.
  """
  rows = batch * count
  picked = []
  for stream, share in heldout_shares(tokens, rows):
    windows = windows_in(stream, seq_len)
    source = Windows(stream, seq_len)
    picked += [source[row * windows // share] for row in range(share)]
  return [stack(picked[i : i + batch]) for i in range(0, rows, batch)]


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


def stack(windows: list[np.ndarray]) -> dict[str, np.ndarray]:
  """Makes a batch of windows: {'tokens': int32 [B, L+1]}, and other `KEYS`."""
  rows = np.stack(windows)
  if rows.ndim == 2:
    return {'tokens': rows}
  return {key: rows[:, k] for k, key in enumerate(KEYS[: rows.shape[1]])}
