# SPDX-License-Identifier: Apache-2.0
"""A corpus of documents in files, of any size: some files, or a mix of some.

The held-out documents have a path of their own or are, without one, the last
documents of each file.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence

from diloco.data.corpus import Corpus
from diloco.data.documents import (
  DocumentFile,
  DocumentRange,
  Mixture,
  TokenIndex,
  TokenStream,
  load_or_build,
)
from diloco.data.paths import Watch, unwatched
from diloco.data.sources import FORMATS
from diloco.data.tokenizers import Tokenizer, fingerprint


@dataclasses.dataclass(frozen=True)
class MixtureSource:
  """Some files and their share of a mix.

  Attributes:
    format: a key of `FORMATS`.
    path: a file, a folder or a pattern.
    text_key: column or feature with the text.
    weight: share of rows, relative to the others'.
  """

  format: str
  path: str
  text_key: str
  weight: float = 1.0


def file_corpus(
  sources: Sequence[MixtureSource],
  heldout: MixtureSource | None,
  heldout_percent: float,
  tokenizer: Tokenizer,
  index_folder: str,
  say: Callable[[str], None],
  watch: Watch = unwatched,
) -> Corpus:
  """Opens the files and their indices; reads documents only to index them.

  Args:
    heldout: what is held out; None: the last documents of each file.
    heldout_percent: percentage of each file's documents, if `heldout` is None;
      a file of two or more holds out at least one.
    say, watch: as of `load_or_build`, for one source after the other.

  Raises:
    FileNotFoundError: a source has no files.
    ValueError: a file is malformed, or its tokens are another tokenizer's, or
      the index folder can't be written.
  """

  def load(source: MixtureSource) -> Loaded:
    return _load(source, tokenizer, index_folder, say, watch)

  loaded = [load(source) for source in sources]
  percent = 0.0 if heldout else heldout_percent
  train = [_stream(each, tokenizer, percent, False) for each in loaded]
  if heldout:
    held_files = [load(heldout)]
    held = [_stream(held_files[0], tokenizer, 100.0, True)]
    held_weights = (1.0,)
  else:
    held = [_stream(each, tokenizer, percent, True) for each in loaded]
    held_weights = tuple(source.weight for source in sources)
  weights = tuple(source.weight for source in sources)
  described = [
    [source.format, source.weight, stream.run_tokens, _described(files)]
    for source, stream, files in zip(sources, train, loaded)
  ]
  described.append([percent, _described(held_files[0]) if heldout else None])
  return Corpus(
    name=' and '.join(f'{each.format} of {each.path}' for each in sources),
    train=_mixed(train, weights),
    heldout=_mixed(held, held_weights),
    fingerprint=fingerprint(
      tokenizer.fingerprint.encode(), json.dumps(described).encode()
    ),
    tokenizer=tokenizer,
  )


def heldout_documents(count: int, percent: float) -> int:
  """Returns how many documents at the end of a file are held out."""
  if percent == 0 or (count < 2 and percent < 100):
    return 0
  return math.ceil(count * percent / 100)


Loaded = list[tuple[DocumentFile, TokenIndex]]


def _load(
  source: MixtureSource,
  tokenizer: Tokenizer,
  index_folder: str,
  say: Callable[[str], None],
  watch: Watch,
) -> Loaded:
  files = FORMATS[source.format].open_files(source.path, source.text_key)
  for file in files:
    if file.tokenizer not in ('', tokenizer.fingerprint):
      raise ValueError(
        f'{file.name}: its tokens are not those of '
        f'data.tokenizer={tokenizer.name!r}; contents.json beside it names the '
        'tokenizer that made them'
      )
  indices = load_or_build(files, tokenizer, index_folder, say, watch)
  return list(zip(files, indices))


def _stream(
  loaded: Loaded, tokenizer: Tokenizer, percent: float, heldout: bool
) -> TokenStream:
  spans = []
  for file, index in loaded:
    cut = file.count - heldout_documents(file.count, percent)
    first, stop = (cut, file.count) if heldout else (0, cut)
    spans.append(DocumentRange(file, index, first, stop))
  tokens = sum(int(index.offsets[-1]) for _, index in loaded)
  groups = sum(file.groups for file, _ in loaded)
  text_bytes = sum(index.text_bytes for _, index in loaded)
  return TokenStream(
    spans,
    tokenizer,
    run_tokens=tokens // groups if groups else 0,
    bytes_per_token=text_bytes / max(tokens, 1),
  )


def _mixed(
  streams: Sequence[TokenStream], weights: Sequence[float]
) -> TokenStream | Mixture:
  if len(streams) == 1:
    return streams[0]
  return Mixture(tuple(streams), tuple(weights))


def _described(loaded: Loaded) -> list:
  """Returns what determines a source's windows, without its location."""
  return [[index.digest, file.count] for file, index in loaded]
