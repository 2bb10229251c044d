# SPDX-License-Identifier: Apache-2.0
"""The tokens of many documents as one sequence that can be sliced.

Concat-and-split: documents follow one another, each with its end token, and
windows are cut from that. There is no padding, and only the bounds of files are
held in memory; the documents of a slice are read and tokenised again.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from diloco.data.documents import DocumentFile
from diloco.data.token_index import TokenIndex
from diloco.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Span:
  """Documents first … stop - 1 of a file."""

  file: DocumentFile
  index: TokenIndex
  first: int
  stop: int

  @property
  def tokens(self) -> int:
    """Number of tokens."""
    return int(self.index.offsets[self.stop] - self.index.offsets[self.first])

  def read(self, start: int, stop: int, tokenizer: Tokenizer) -> np.ndarray:
    """Returns int32 tokens start … stop - 1 of the span.

    Raises:
      ValueError: a document is not the one that was indexed.
    """
    offsets = self.index.offsets
    base = int(offsets[self.first])
    start, stop = base + start, base + stop
    # Of several empty documents, which share an offset, the last one.
    first = int(np.searchsorted(offsets, np.uint64(start), 'right')) - 1
    last = int(np.searchsorted(offsets, np.uint64(stop), 'left'))
    documents = self.file.tokens(first, last, tokenizer)
    found = np.array([len(each) for each in documents], np.uint64)
    if not np.array_equal(found, np.diff(offsets[first : last + 1])):
      raise ValueError(
        f'{self.file.name}: documents {first} … {last - 1} are not those that '
        'were indexed: the file changed under the run'
      )
    skipped = start - int(offsets[first])
    return np.concatenate(documents)[skipped : skipped + stop - start]


class TokenStream:
  """Spans as one row of tokens, with a length and slices.

  Args:
    spans: in order; those without tokens are left out.
    tokenizer: tokenizer of all of them.
    run_tokens: tokens in a piece that is read as a whole; 0 if documents are
      read one by one.
    bytes_per_token: bytes of text per token, on average.
  """

  def __init__(
    self,
    spans: Sequence[Span],
    tokenizer: Tokenizer,
    run_tokens: int = 0,
    bytes_per_token: float = 1.0,
  ):
    self._spans = [span for span in spans if span.tokens]
    self._tokenizer = tokenizer
    self._bounds = np.cumsum([0, *(span.tokens for span in self._spans)])
    self.run_tokens = run_tokens
    self.bytes_per_token = bytes_per_token

  def __len__(self) -> int:
    return int(self._bounds[-1])

  def __getitem__(self, where: slice) -> np.ndarray:
    """Returns int32 [stop - start]; the step must be 1."""
    start, stop, step = where.indices(len(self))
    if step != 1:
      raise ValueError(f'{where}: tokens are read without gaps')
    parts = [np.empty(0, np.int32)]
    k = int(np.searchsorted(self._bounds, start, 'right')) - 1
    while start < stop:
      begin, end = int(self._bounds[k]), min(stop, int(self._bounds[k + 1]))
      span = self._spans[k]
      parts.append(span.read(start - begin, end - begin, self._tokenizer))
      start, k = end, k + 1
    return np.concatenate(parts)


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture:
  """Streams that are drawn from in proportion to their weights.

  Attributes:
    streams: at least two.
    weights: weight of each, above 0; shares of rows, whatever the streams'
      lengths.
  """

  streams: tuple[TokenStream, ...]
  weights: tuple[float, ...]
