# SPDX-License-Identifier: Apache-2.0
"""Files of documents that are read by number, whatever their format."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from diloco.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentFile:
  """One file, or a range of its documents; nothing of it is kept open here.

  Attributes:
    name: for people, such as its path.
    stamp: differs where documents may differ.
    count: documents.
    groups: pieces that are read as a whole; 0: each document by itself.
    read: documents start … stop - 1; UTF-8, or tokens where `dtype` says so.
    dtype: of tokens, where documents are tokens with all ends among them.
    tokenizer: fingerprint of the one that made the tokens; '' for text.
    index: folder and name of an index that came with the file, if one did.
  """

  name: str
  stamp: str
  count: int
  groups: int
  read: Callable[[int, int], Sequence[bytes]]
  dtype: str = ''
  tokenizer: str = ''
  index: tuple[str, str] | None = None

  def tokens(
    self, start: int, stop: int, tokenizer: Tokenizer
  ) -> list[np.ndarray]:
    """int32 [tokens] of each of the documents start … stop - 1."""
    return self.encode(self.read(start, stop), tokenizer)

  def encode(
    self, documents: Sequence[bytes], tokenizer: Tokenizer
  ) -> list[np.ndarray]:
    """int32 [tokens] of documents as `read` gives them.

    Raises:
      ValueError: one is not UTF-8, where the tokenizer takes nothing else.
    """
    if self.dtype:
      return [
        np.frombuffer(each, self.dtype).astype(np.int32) for each in documents
      ]
    try:
      return tokenizer.encode(documents)
    except UnicodeDecodeError as error:
      raise ValueError(
        f'{self.name}: a document is not UTF-8 ({error.reason}): '
        f'{error.object[max(0, error.start - 20) : error.end + 20]!r}'
      ) from None
