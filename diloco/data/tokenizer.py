# SPDX-License-Identifier: Apache-2.0
"""The interface of a tokenizer, and the tokenizer of bytes.

A document's tokens end with the tokenizer's end token, so that documents can be
joined. An empty document has no tokens at all.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """A tokenizer; made by `tokenizer_kinds.make_tokenizer`.

  Attributes:
    name: as in the configuration, such as 'sentencepiece:FILE'.
    vocab: tokens are 0 … vocab - 1, `end` among them.
    end: follows each document.
    fingerprint: hex sha256 of all that determines tokens.
    raw_encode: maps texts in UTF-8 to their tokens, without `end`.
    raw_decode: maps tokens to the bytes of their text.
  """

  name: str
  vocab: int
  end: int
  fingerprint: str
  raw_encode: Callable[[Sequence[bytes]], Sequence[Sequence[int]]]
  raw_decode: Callable[[Sequence[int]], bytes]

  def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
    """Returns tokens of each document, int32 [tokens], followed by `end`.

    Raises:
      ValueError: a text is not UTF-8, which all tokenizers but bytes require.
    """
    encoded = self.raw_encode(texts)
    return [
      np.append(np.asarray(tokens, np.int32), np.int32(self.end))
      if text
      else np.empty(0, np.int32)
      for text, tokens in zip(texts, encoded)
    ]

  def decode(self, tokens: Sequence[int]) -> bytes:
    """Returns the text of tokens; `end` has none."""
    return self.raw_decode([t for t in tokens if t != self.end])


def fingerprint(*parts: bytes) -> str:
  """Returns hex sha256 over parts of any length, each with its length."""
  digest = hashlib.sha256()
  for part in parts:
    digest.update(len(part).to_bytes(8, 'little'))
    digest.update(part)
  return digest.hexdigest()


def unicode_of(texts: Sequence[bytes]) -> list[str]:
  """Decodes the texts.

  Raises:
    ValueError: one is not UTF-8.
  """
  return [text.decode() for text in texts]


BYTES = Tokenizer(
  name='bytes',
  vocab=256,
  end=0,  # As between the files of `corpus`: it occurs in no text.
  fingerprint=fingerprint(b'bytes'),
  raw_encode=lambda texts: [np.frombuffer(text, np.uint8) for text in texts],
  raw_decode=bytes,
)
