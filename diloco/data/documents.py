# SPDX-License-Identifier: Apache-2.0
"""Files of documents, read by index, whatever their format."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from diloco.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentFile:
  """One file, or a range of its documents; it holds no open file itself.

  Attributes:
    name: for humans, such as its path.
    stamp: differs if documents may differ.
    count: number of documents.
    groups: number of pieces that are read as a whole; 0: each document by
      itself.
    read: reads documents start … stop - 1, as UTF-8, or tokens if `dtype` is
      set.
    dtype: dtype of tokens, if documents are tokens with end tokens included.
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
    """Returns int32 [tokens] of each of the documents start … stop - 1."""
    return self.encode(self.read(start, stop), tokenizer)

  def encode(
    self, documents: Sequence[bytes], tokenizer: Tokenizer
  ) -> list[np.ndarray]:
    """Returns int32 [tokens] of documents as `read` gives them.

    Raises:
      ValueError: one is not UTF-8, which the tokenizer requires.
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
