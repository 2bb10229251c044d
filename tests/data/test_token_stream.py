# SPDX-License-Identifier: Apache-2.0
"""Any slice of the tokens of documents is what joining them all would give."""

import random

import numpy as np
import pytest

from diloco.data.documents import (
  DocumentFile,
  DocumentRange,
  TokenIndex,
  TokenStream,
)
from diloco.data.tokenizers import BYTES


class Shelf:
  """Documents that count how often they are read."""

  def __init__(self, documents):
    self.documents = documents
    self.reads = 0
    self.file = DocumentFile('shelf', '', len(documents), 0, self._read)
    sizes = [len(each) for each in BYTES.encode(documents)]
    offsets = np.cumsum([0, *sizes]).astype(np.uint64)
    self.index = TokenIndex(offsets, '', sum(map(len, documents)))

  def _read(self, start, stop):
    self.reads += stop - start
    return self.documents[start:stop]

  def span(self, first=0, stop=None):
    stop = len(self.documents) if stop is None else stop
    return DocumentRange(self.file, self.index, first, stop)


def _shelf(seed, count=40):
  rng = random.Random(seed)
  sizes = [rng.choice([0, 0, 1, 2, 30]) for _ in range(count)]
  return Shelf([bytes(rng.choices(range(1, 256), k=size)) for size in sizes])


def _joined(*parts):
  tokens = [token for part in parts for token in BYTES.encode(part)]
  return np.concatenate(tokens)


@pytest.mark.parametrize('seed', range(8))
def test_every_slice_is_of_the_joined_documents(seed):
  one, empty, two = _shelf(seed), Shelf([b'', b'']), _shelf(seed + 100)
  spans = [one.span(3, 30), empty.span(), two.span(1)]
  stream = TokenStream(spans, BYTES)
  joined = _joined(one.documents[3:30], two.documents[1:])
  assert len(stream) == len(joined)
  for start in range(0, len(joined), 7):
    for size in (0, 1, 2, 33, len(joined)):
      expected = joined[start : start + size]
      np.testing.assert_array_equal(stream[start : start + size], expected)


def test_a_slice_reads_only_the_documents_that_it_touches():
  shelf = Shelf([b'x' * 9 for _ in range(1000)])
  stream = TokenStream([shelf.span()], BYTES)
  stream[5000:5010]  # One document, with its end.
  assert shelf.reads == 1
  stream[5005:5015]
  assert shelf.reads == 3


def test_documents_that_changed_are_noticed():
  shelf = Shelf([b'one', b'two', b'three'])
  stream = TokenStream([shelf.span()], BYTES)
  shelf.documents[1] = b'more'
  np.testing.assert_array_equal(stream[0:4], [*b'one', 0])
  with pytest.raises(ValueError, match='shelf: documents 1 … 1 are not those'):
    stream[5:6]


@pytest.mark.parametrize('seed', range(8))
def test_segments_are_the_documents_of_the_tokens(seed):
  one, empty, two = _shelf(seed), Shelf([b'', b'']), _shelf(seed + 100)
  stream = TokenStream([one.span(3, 30), empty.span(), two.span(1)], BYTES)
  documents = BYTES.encode([*one.documents[3:30], *two.documents[1:]])
  of_tokens = np.repeat(np.arange(len(documents)), list(map(len, documents)))
  for start in range(0, len(of_tokens), 7):
    for size in (1, 2, 33, len(of_tokens)):
      expected = of_tokens[start : start + size]
      found = stream.segments(start, start + len(expected))
      assert found[0] == 0 and found.dtype == np.int32
      # The same tokens are together, whatever the documents between them.
      np.testing.assert_array_equal(np.diff(found), np.diff(expected) > 0)
