# SPDX-License-Identifier: Apache-2.0
"""Corpora: text, the standard library, a random language, files of documents.

By the fingerprint the syncer refuses a learner that would train on other text:
the standard library differs between versions of Python.
"""

import dataclasses
import functools
import hashlib
import json
import math
import os
import pathlib
import string
import sysconfig
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from diloco.data.documents import (
  DOCUMENTS_AT_ONCE,
  DocumentFile,
  DocumentRange,
  Mixture,
  TokenIndex,
  TokenStream,
  load_or_build,
)
from diloco.data.paths import Watch, unwatched
from diloco.data.sources import (
  FORMATS,
  HELDOUT_PERCENT,
  MixtureSource,
  heldout_bytes,
  is_masked,
  text_files,
)
from diloco.data.tokenizers import BYTES, Tokenizer, fingerprint

HASHED_AT_ONCE = 1 << 20  # Tokens.
LOOKED_AT = 1 << 12  # Tokens at either end of a part.
SEPARATOR = b'\0'  # Between files; it occurs in no text.

# Directories of the standard library that are not counted as its text: what was
# installed later, and tests, which not every distribution ships.
_NOT_STDLIB = frozenset(
  {
    '__pycache__',
    'dist-packages',
    'idle_test',
    'site-packages',
    'test',
    'tests',
  }
)
# Written by the build or the distribution: these differ between equal Pythons.
_BUILT = ('_sysconfigdata', 'sitecustomize', 'usercustomize')
CHANCES = (8, 4, 2, 1, 1)  # Sixteenths.
# 1.875 bits: no model does better, given `ORDER` bytes of context.
ENTROPY_RATE = -sum(c / 16 * math.log(c / 16) for c in CHANCES)  # Nats a byte.
ORDER, SYMBOLS = 2, 16
CONTEXTS = SYMBOLS**ORDER

_WALK, _TABLE = 0, 1  # Streams of draws.


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
  """The text of a run.

  Attributes:
    train: uint8 [bytes], or other integers [tokens]; for files of documents, a
      stream of tokens. Any object will do that has a length and slices.
    heldout: like `train`, but never trained on.
    fingerprint: hex sha256 over both.
  """

  name: str
  train: np.ndarray | TokenStream | Mixture
  heldout: np.ndarray | TokenStream | Mixture
  fingerprint: str
  tokenizer: Tokenizer = BYTES


def no_corpus() -> Corpus:
  """Returns the corpus of a run whose text only its loops know."""
  nothing = np.zeros(0, np.uint8)
  return Corpus('given', nothing, nothing, 'none here')


def make_corpus(name: str, train: bytes, heldout: bytes) -> Corpus:
  """Makes a corpus of these bytes.

  Raises:
    ValueError: One part has fewer than 2 bytes: there is nothing to predict.
  """
  for part, text in (('training', train), ('held-out', heldout)):
    if len(text) < 2:
      raise ValueError(
        f'corpus {name}: {len(text)} bytes of {part} text, must be at least 2'
      )
  digest = hashlib.sha256(len(train).to_bytes(8, 'little'))
  digest.update(train)
  digest.update(heldout)
  return Corpus(
    name=name,
    train=np.frombuffer(train, np.uint8),
    heldout=np.frombuffer(heldout, np.uint8),
    fingerprint=digest.hexdigest(),
  )


def token_corpus(
  name: str,
  train: np.ndarray,
  heldout: np.ndarray,
  tokenizer: Tokenizer = BYTES,
) -> Corpus:
  """Makes a corpus of tokens; reads them all, once, for the fingerprint.

  Args:
    name: in messages.
    train: integers [tokens], possibly a memory map; one of files of any size is
      better given as `Corpus`, with a fingerprint from what made the files.
    heldout: like `train`, never trained on.
    tokenizer: needed where text is drawn, and questions are asked.
  """
  digest = hashlib.sha256()
  for tokens in (train, heldout):
    digest.update(f'{tokens.dtype.str}{len(tokens)} '.encode())
    for start in range(0, len(tokens), HASHED_AT_ONCE):
      digest.update(tokens[start : start + HASHED_AT_ONCE].tobytes())
  return Corpus(name, train, heldout, digest.hexdigest(), tokenizer)


def check_corpus(corpus: Corpus, vocab: int) -> Corpus:
  """Checks what a source of the user's own gives.

  Looks at the first and the last tokens of both parts.

  Args:
    vocab: of the model.

  Returns:
    The corpus.

  Raises:
    ValueError: it is no corpus, or its parts are no integers in one row, or
      they are no tokens of the model.
  """
  if not isinstance(corpus, Corpus):
    raise ValueError(
      f'gave a {type(corpus).__name__}, must give a '
      'diloco.data.corpus.Corpus, such as token_corpus(name, train, heldout)'
    )
  if not (isinstance(corpus.fingerprint, str) and corpus.fingerprint):
    raise ValueError(
      f'its fingerprint is {corpus.fingerprint!r}, must be a text that differs '
      'where tokens do'
    )
  for part in ('train', 'heldout'):
    tokens = getattr(corpus, part)
    for where in (slice(0, LOOKED_AT), slice(-LOOKED_AT, None)):
      start, stop, _ = where.indices(len(tokens))
      some = tokens[start:stop]
      kind = getattr(some, 'dtype', np.dtype(object))
      if not np.issubdtype(kind, np.integer) or some.ndim != 1:
        raise ValueError(
          f'its {part} is {kind} {np.shape(some)}, must be integers [tokens]'
        )
      if some.size and not 0 <= some.min() <= some.max() < vocab:
        raise ValueError(
          f'its {part} has tokens {some.min()} … {some.max()}, must be in '
          f'0 … {vocab - 1}, as model.vocab={vocab}'
        )
  return corpus


def stdlib_corpus(
  root: pathlib.Path | str | None = None, heldout_percent: int = 4
) -> Corpus:
  """Returns the source text of Python's own standard library, about 11 MB.

  Files are joined in order of their relative path. Whole files are held out,
  chosen by a hash of the path, so that a file never changes sides.

  Args:
    root: The library's folder; None: that of the running Python.
    heldout_percent: Share of the files, from 1 to 50.

  Raises:
    FileNotFoundError: There is no .py file, as in an embedded Python that keeps
      its library in a zip.
  """
  root = pathlib.Path(root or sysconfig.get_path('stdlib'))
  paths = stdlib_paths(root)
  if not paths:
    raise FileNotFoundError(
      f'no .py source of the standard library under {root} (an embedded '
      'Python?); train on the grammar or on a text of your own instead'
    )
  sides = {True: [], False: []}
  for path in paths:
    text = (root / path).read_bytes()
    sides[is_heldout(path, heldout_percent)].append(text)
  return make_corpus(
    f'stdlib of {root}',
    SEPARATOR.join(sides[False]),
    SEPARATOR.join(sides[True]),
  )


def stdlib_paths(root: pathlib.Path) -> list[str]:
  """Returns sorted relative paths, with '/', of the library's own .py files."""
  paths = []
  for directory, names, files in os.walk(root):
    names[:] = [name for name in names if name not in _NOT_STDLIB]
    relative = pathlib.Path(directory).relative_to(root)
    paths.extend(
      (relative / name).as_posix()
      for name in files
      if name.endswith('.py') and not name.startswith(_BUILT)
    )
  return sorted(paths)


def is_heldout(path: str, percent: int) -> bool:
  """Returns True if a file is held out, by a hash of its relative path."""
  digest = hashlib.sha256(path.encode()).digest()
  return int.from_bytes(digest[:4], 'little') % 100 < percent


def text_corpus(path: pathlib.Path | str) -> Corpus:
  """Returns a corpus of the user's text; the end of every file is held out.

  Args:
    path: A file, or a directory that is searched recursively.

  Raises:
    FileNotFoundError: It is missing, or the directory has no file of text.
    ValueError: All the text together is too short to hold some of it out.
  """
  train, heldout = [], []
  for file in text_files(pathlib.Path(path)):
    text = file.read_bytes()
    cut = len(text) - heldout_bytes(len(text))
    train.append(text[:cut])
    heldout.append(text[cut:])
  return make_corpus(
    f'text of {path}', SEPARATOR.join(train), SEPARATOR.join(heldout)
  )


def unigram_entropy(train: np.ndarray, heldout: np.ndarray) -> float:
  """Returns nats per byte of `heldout` under u(b) = (n_b + 1) / (n + 256)."""
  return float(-np.mean(np.log(_unigram(train))[heldout]))


def bigram_entropy(train: np.ndarray, heldout: np.ndarray) -> float:
  """Returns nats per byte of `heldout` under the bigram model of `train`.

  p(b | a) = (n_ab + u(b)) / (n_a + 1): one additional count after each byte,
  distributed like the unigram model u, so that unseen pairs keep a probability.
  The mean runs over all bytes of `heldout` but the first, which has no context.

  Args:
    train: uint8 [bytes], at least 2.
    heldout: uint8 [bytes], at least 2.
  """
  pairs = np.bincount(_pairs(train), minlength=1 << 16).reshape(256, 256)
  prior = _unigram(train)[None, :]
  chance = (pairs + prior) / (pairs.sum(axis=1, keepdims=True) + 1.0)
  return float(-np.mean(np.log(chance).reshape(-1)[_pairs(heldout)]))


def _unigram(train: np.ndarray) -> np.ndarray:
  return (np.bincount(train, minlength=256) + 1.0) / (len(train) + 256.0)


def _pairs(text: np.ndarray) -> np.ndarray:
  return text[:-1].astype(np.uint16) << 8 | text[1:]


# A random language whose entropy rate is known exactly.
#
# A Markov source: each context of `ORDER` symbols is followed by one of five
# successors, with the probabilities 8, 4, 2, 1 and 1 sixteenths. Which five,
# and in which order, is drawn per context from the seed; the probabilities are
# the same in every context, and so is their entropy: it is the entropy rate,
# whatever the contexts' frequencies.
#
# All randomness is integer arithmetic modulo 2^64 on a counter (the mixing
# function of SplitMix64), so a seed gives the same bytes on every machine.


def grammar_corpus(seed: int, nbytes: int) -> Corpus:
  """Returns text of the language `seed`; the held-out part continues it.

  Args:
    seed: Seed of the language and of the walk through it, from 0 to 2^32 - 1.
    nbytes: Bytes of training text; 4 % more are held out, at least 1,024.
  """
  heldout = max(1024, nbytes * HELDOUT_PERCENT // 100)
  text = _walk(seed, nbytes + heldout)
  name = f'grammar {seed=} order={ORDER} symbols={SYMBOLS}'
  return make_corpus(name, text[:nbytes], text[nbytes:])


def draws(seed: int, stream: int, count: int) -> np.ndarray:
  """Returns uniform uint64 [count]; streams of one seed are independent."""
  mix = np.uint64(seed) << np.uint64(32) | np.uint64(stream)
  with np.errstate(over='ignore'):
    start = _mixed(np.asarray([mix]))
    step = np.uint64(0x9E3779B97F4A7C15)
    return _mixed(start + step * np.arange(1, count + 1, dtype=np.uint64))


def _mixed(z: np.ndarray) -> np.ndarray:
  z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return z ^ (z >> np.uint64(31))


def _successors(seed: int) -> np.ndarray:
  """Returns [contexts, 16], the next symbol for each draw of four bits."""
  keys = draws(seed, _TABLE, CONTEXTS * SYMBOLS).reshape(CONTEXTS, SYMBOLS)
  # Sorting random keys shuffles the alphabet; ties go by position.
  shuffled = np.argsort(keys, axis=1, kind='stable')[:, : len(CHANCES)]
  return np.repeat(shuffled, CHANCES, axis=1)


def _walk(seed: int, length: int) -> bytes:
  table = _successors(seed).reshape(-1).tolist()
  nibbles = (draws(seed, _WALK, length) >> np.uint64(60)).tolist()
  text = np.empty(length, np.uint8)
  context = 0
  for i, nibble in enumerate(nibbles):
    symbol = table[context * 16 + nibble]
    context = (context * SYMBOLS + symbol) % CONTEXTS
    text[i] = symbol
  letters = np.frombuffer(string.ascii_lowercase.encode(), np.uint8)
  return letters[text].tobytes()


# Documents in files of any size: some files, or a mix of some.
#
# The held-out documents have a path of their own or are, without one, the last
# documents of each file.


def file_corpus(
  sources: Sequence[MixtureSource],
  heldout: MixtureSource | None,
  heldout_percent: float,
  tokenizer: Tokenizer,
  index_folder: str,
  say: Callable[[str], None],
  watch: Watch = unwatched,
  apart: bool = True,
) -> Corpus:
  """Opens the files and their indices; reads documents only to index them.

  Args:
    heldout: what is held out; None: the last documents of each file.
    heldout_percent: percentage of each file's documents, if `heldout` is None;
      a file of two or more holds out at least one.
    say, watch: as of `load_or_build`, for one source after the other.
    apart: see `TokenStream`.

  Raises:
    FileNotFoundError: a source has no files.
    ValueError: a file is malformed, or its tokens are another tokenizer's, or
      the index folder can't be written.
  """

  def load(source: MixtureSource) -> Loaded:
    return _load(source, tokenizer, index_folder, say, watch)

  loaded = [load(source) for source in sources]
  percent = 0.0 if heldout else heldout_percent
  stream = functools.partial(
    _stream,
    tokenizer=tokenizer,
    apart=apart,
    masked=any(is_masked(source.text_key) for source in sources),
  )
  train = [stream(each, percent, False) for each in loaded]
  if heldout:
    held_files = [load(heldout)]
    masked = is_masked(heldout.text_key)
    held = [stream(held_files[0], 100.0, True, masked=masked)]
    held_weights = (1.0,)
  else:
    held = [stream(each, percent, True) for each in loaded]
    held_weights = tuple(source.weight for source in sources)
  weights = tuple(source.weight for source in sources)
  described = [
    [source.format, source.weight, stream.run_tokens, _described(files)]
    for source, stream, files in zip(sources, train, loaded)
  ]
  described.append([percent, _described(held_files[0]) if heldout else None])
  return Corpus(
    name=' and '.join(f'{each.format} of {each.path}' for each in sources),
    train=_mixture(train, weights),
    heldout=_mixture(held, held_weights),
    fingerprint=fingerprint(
      tokenizer.fingerprint.encode(), json.dumps(described).encode()
    ),
    tokenizer=tokenizer,
  )


def section_corpus(
  data,
  tokenizer: Tokenizer,
  say: Callable[[str], None],
  watch: Watch = unwatched,
) -> Corpus:
  """Returns `file_corpus` of the section `data` of a configuration."""
  return file_corpus(
    data.items,
    data.heldout,
    data.heldout_percent,
    tokenizer,
    data.index_path,
    say=say,
    watch=watch,
    apart=data.apart,
  )


def size_of(tokens: TokenStream | Mixture) -> tuple[int, int]:
  """Returns the numbers of documents and tokens."""
  streams = tokens.streams if isinstance(tokens, Mixture) else (tokens,)
  return sum(each.documents for each in streams), sum(map(len, streams))


# Tried in this order, where no `text_key` is given.
TEXT_KEYS = ('text', 'chat:messages', 'prompt+completion')


def text_key_of(format_: str, path: str, index_folder: str) -> str:
  """Returns the first of `TEXT_KEYS` that the first record has, or 'text'.

  Raises:
    FileNotFoundError, ValueError: as `open_files` of the format does, but for
      a record that has none of them.
  """
  for key in TEXT_KEYS:
    try:
      files = FORMATS[format_].open_files(path, key, index_folder)
      files[0].read(0, min(1, files[0].count))
    except ValueError:
      continue
    return key
  return TEXT_KEYS[0]


def training_texts(data) -> Iterator[str]:
  """Yields the texts that the section `data` trains on, in order.

  Of dialogues these are their messages, or prompts and completions.

  Raises:
    FileNotFoundError, ValueError: as `file_corpus` does.
  """
  percent = 0.0 if data.heldout else data.heldout_percent
  for source in data.items:
    for file in FORMATS[source.format].open_files(
      source.path, source.text_key, data.index_path
    ):
      stop = file.count - heldout_documents(file.count, percent)
      for first in range(0, stop, DOCUMENTS_AT_ONCE):
        for each in file.read(first, min(first + DOCUMENTS_AT_ONCE, stop)):
          if not file.masked:
            yield each.decode(errors='replace')
            continue
          yield from (message['content'] for message in each.messages)
          yield from (text for text, _ in each.parts)


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
  files = FORMATS[source.format].open_files(
    source.path, source.text_key, index_folder
  )
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
  loaded: Loaded,
  percent: float,
  heldout: bool,
  tokenizer: Tokenizer,
  apart: bool,
  masked: bool,
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
    apart=apart,
    masked=masked,
  )


def _mixture(
  streams: Sequence[TokenStream], weights: Sequence[float]
) -> TokenStream | Mixture:
  if len(streams) == 1:
    return streams[0]
  return Mixture(tuple(streams), tuple(weights))


def _described(loaded: Loaded) -> list:
  """Returns what determines a source's windows, without its location."""
  return [[index.digest, file.count] for file, index in loaded]
