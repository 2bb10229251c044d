# SPDX-License-Identifier: Apache-2.0
"""Documents by number, an index of their tokens, and those as one row."""

import array
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import resource
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from etils import epath

from diloco.data import paths
from diloco.data.dialogues import Dialogue, split_signed
from diloco.data.paths import Watch, unwatched
from diloco.data.tokenizers import Tokenizer

FORMAT = 1
DOCUMENTS_AT_ONCE = 256
# Reserve for sockets, logs, libraries, other sources of a mix.
OPEN_ANYWAY = 512
DEFAULT_FOLDER = '~/.cache/diloco/indices'
OFFSETS, MEANING = '.tokens.npy', '.tokens.json'


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentFile:
  """One file, or a range of its documents; it holds no open file itself.

  Attributes:
    stamp: differs if documents may differ.
    groups: number of pieces that are read as a whole; 0: each document by
      itself.
    read: reads documents start … stop - 1, as UTF-8, or tokens if `dtype` is
      set, or `Dialogue`s if `masked` is.
    dtype: dtype of tokens, if documents are tokens with end tokens included.
    tokenizer: fingerprint of the one that made the tokens; '' for text.
    index: folder and name of an index that came with the file, if one did.
    masked: whether some of the tokens count only. Tokens are then signed, as
      `dialogues.split_signed` takes them.
  """

  name: str
  stamp: str
  count: int
  groups: int
  read: Callable[[int, int], Sequence[bytes | Dialogue]]
  dtype: str = ''
  tokenizer: str = ''
  index: tuple[str, str] | None = None
  masked: bool = False

  def tokens(
    self, start: int, stop: int, tokenizer: Tokenizer
  ) -> list[np.ndarray]:
    """Returns int32 [tokens] of each of the documents start … stop - 1."""
    return self.encode(self.read(start, stop), tokenizer)

  def encode(
    self, documents: Sequence[bytes | Dialogue], tokenizer: Tokenizer
  ) -> list[np.ndarray]:
    """Returns int32 [tokens] of documents as `read` gives them.

    Raises:
      ValueError: one is not UTF-8, which the tokenizer requires.
    """
    if self.dtype:
      return [
        np.frombuffer(each, self.dtype).astype(np.int32) for each in documents
      ]
    if self.masked:
      return [tokenizer.encode_dialogue(each) for each in documents]
    try:
      return tokenizer.encode(documents)
    except UnicodeDecodeError as error:
      raise ValueError(
        f'{self.name}: a document is not UTF-8 ({error.reason}): '
        f'{error.object[max(0, error.start - 20) : error.end + 20]!r}'
      ) from None


# An index of where each document of a file begins in its tokens.
#
# With it any window of tokens can be read by its number alone, so that the
# position of a batch stays the whole state of a dataset. It is built once, in
# one pass over the documents, and then memory-mapped: 8 bytes per document on a
# local disk. Processes of a machine share it, and share the work of building
# those of many files.


@dataclasses.dataclass(frozen=True, eq=False)
class TokenIndex:
  """The index of one file.

  Attributes:
    offsets: uint64 [documents + 1]: document i has the tokens from offsets[i]
      to offsets[i + 1]; a memory map.
    digest: hex sha256 over all its tokens.
    text_bytes: bytes of its text in UTF-8.
  """

  offsets: np.ndarray
  digest: str
  text_bytes: int


class IndexBuilder:
  """Takes documents in order; `write` makes the two files of an index."""

  def __init__(self):
    self._offsets = array.array('Q', [0])
    self._digest = hashlib.sha256()
    self._text_bytes = 0

  def add(self, tokens: Sequence[np.ndarray], text_bytes: int):
    """Adds documents' tokens, int32, and the total length of their texts."""
    for each in tokens:
      self._digest.update(each.astype('<i4', copy=False))
      self._offsets.append(self._offsets[-1] + len(each))
    self._text_bytes += text_bytes

  def write(self, folder: pathlib.Path, name: str):
    """Writes both files atomically; the file of its meaning comes last."""
    meaning = {
      'format': FORMAT,
      'documents': len(self._offsets) - 1,
      'tokens': self._offsets[-1],
      'text_bytes': self._text_bytes,
      'digest': self._digest.hexdigest(),
    }
    with replacing(folder / (name + OFFSETS)) as file:
      np.save(file, np.frombuffer(self._offsets, np.uint64))
    with replacing(folder / (name + MEANING)) as file:
      file.write(json.dumps(meaning, indent=1).encode() + b'\n')


def allow_open(files: int) -> None:
  """Raises this process's limit of open files by `files`.

  Raises:
    ValueError: the machine forbids it; says how to allow it.
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft == resource.RLIM_INFINITY or soft >= OPEN_ANYWAY + 2 * files:
    return
  wanted = soft + files
  if hard != resource.RLIM_INFINITY and wanted > hard:
    raise ValueError(
      f'data: {files} files would be open, this process may have {hard} in '
      "all; 'ulimit -n' raises that, and fewer, larger files need less"
    )
  resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def load_or_build(
  files: Sequence[DocumentFile],
  tokenizer: Tokenizer,
  folder: str,
  say: Callable[[str], None],
  watch: Watch = unwatched,
) -> list[TokenIndex]:
  """Returns the indices of files, in order; missing ones are built.

  Args:
    folder: local folder of indices; '': `DEFAULT_FOLDER`.
    say: takes a line for each file that is indexed.
    watch: takes how many documents are indexed, of those that were not.

  Raises:
    ValueError: a document can't be tokenised, an index is broken, or the folder
      can't be written.
  """
  root = index_root(folder)
  places = [_place(file, tokenizer, root) for file in files]
  missing = [f for f, place in zip(files, places) if not _is_there(place)]
  done, total = 0, sum(file.count for file in missing)
  # First those that no other process is building, then the others.
  for wait in (False, True):
    for i, (file, place) in enumerate(zip(files, places)):
      if _is_there(place):
        continue
      with locked(place[0] / f'{place[1]}.lock', wait) as mine:
        if mine and not _is_there(place):
          say(f'index {i + 1} of {len(files)}: {file.name}')
          for indexed in _build(file, tokenizer, *place):
            watch(done + indexed, total)
          done += file.count
  allow_open(len(files))  # A mapped file keeps a descriptor.
  return [_read(file, *place) for file, place in zip(files, places)]


def index_root(folder: str) -> pathlib.Path:
  """Returns the folder of indices, which is there then.

  Raises:
    ValueError: it can't be written.
  """
  root = pathlib.Path(folder or DEFAULT_FOLDER).expanduser()
  try:
    root.mkdir(parents=True, exist_ok=True)
    (root / 'lock').touch()
  except OSError as error:
    raise ValueError(
      f'data.index_path={folder!r}: {root} can not be written '
      f'({error.strerror})'
    ) from None
  return root


def _place(
  file: DocumentFile, tokenizer: Tokenizer, root: pathlib.Path
) -> tuple[pathlib.Path, str]:
  """Returns folder and name of the index of a file."""
  key = f'{FORMAT}|{file.stamp}|{tokenizer.fingerprint}'
  name = hashlib.sha256(key.encode()).hexdigest()[:32]
  if file.index is None:
    return root, name
  folder, base = file.index
  if not paths.is_remote(folder):
    theirs = pathlib.Path(folder), base
    return theirs if _is_there(theirs) else (root, name)
  # Copied, since a remote file can't be mapped.
  for suffix in (OFFSETS, MEANING):
    remote = epath.Path(f'{folder}/{base}{suffix}')
    if not (root / (name + suffix)).exists() and remote.exists():
      with replacing(root / (name + suffix)) as copy:
        copy.write(remote.read_bytes())
  return root, name


def _is_there(place: tuple[pathlib.Path, str]) -> bool:
  folder, name = place
  return (folder / (name + MEANING)).exists()


def _build(
  file: DocumentFile, tokenizer: Tokenizer, folder: pathlib.Path, name: str
) -> Iterator[int]:
  """Yields how many documents are indexed; the index is there at the end."""
  builder = IndexBuilder()
  for start in range(0, file.count, DOCUMENTS_AT_ONCE):
    stop = min(start + DOCUMENTS_AT_ONCE, file.count)
    documents = file.read(start, stop)
    tokens = file.encode(documents, tokenizer)
    texts = documents
    if file.dtype or file.masked:
      texts = (tokenizer.decode(split_signed(each)[0]) for each in tokens)
    builder.add(tokens, sum(map(len, texts)))
    yield stop
  builder.write(folder, name)


def _read(file: DocumentFile, folder: pathlib.Path, name: str) -> TokenIndex:
  path = folder / (name + MEANING)
  try:
    meaning = json.loads(path.read_text())
    offsets = np.load(folder / (name + OFFSETS), mmap_mode='r')
    fits = (
      meaning['format'] == FORMAT
      and meaning['documents'] == file.count == len(offsets) - 1
      and meaning['tokens'] == int(offsets[-1])
    )
    index = TokenIndex(offsets, meaning['digest'], meaning['text_bytes'])
  except (ValueError, KeyError, TypeError, FileNotFoundError):
    fits = False
  if not fits:
    raise ValueError(
      f'{path}: is no index of {file.name} with {file.count} documents; '
      'delete it, and it is built again'
    )
  return index


@contextlib.contextmanager
def locked(path: pathlib.Path, wait: bool) -> Iterator[bool]:
  """Yields True if this process has the lock, which ends with the process."""
  with path.open('ab') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
      yield False
    else:
      yield True


@contextlib.contextmanager
def replacing(path: pathlib.Path):
  """Yields a file that replaces `path` once it is complete."""
  temporary = path.with_name(f'{path.name}.{os.getpid()}.partial')
  try:
    with temporary.open('wb') as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


# The tokens of many documents as one sequence that can be sliced.
#
# Concat-and-split: documents follow one another, each with its end token, and
# windows are cut from that. There is no padding, and only the bounds of files
# are held in memory; the documents of a slice are read and tokenised again.


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentRange:
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
    sizes = np.array([len(each) for each in documents], np.uint64)
    if not np.array_equal(sizes, np.diff(offsets[first : last + 1])):
      raise ValueError(
        f'{self.file.name}: documents {first} … {last - 1} are not those that '
        'were indexed: the file changed under the run'
      )
    skipped = start - int(offsets[first])
    return np.concatenate(documents)[skipped : skipped + stop - start]

  def begins(self, start: int, stop: int) -> np.ndarray:
    """Returns which tokens from start to stop - 1 are a document's first."""
    offsets = self.index.offsets
    base = int(offsets[self.first])
    bounds = np.array([base + start, base + stop], np.uint64)
    first, last = np.searchsorted(offsets, bounds)
    return offsets[first:last].astype(np.int64) - base


class TokenStream:
  """Spans as one row of tokens, with a length and slices.

  Args:
    spans: in order; those without tokens are left out.
    run_tokens: tokens in a piece that is read as a whole; 0 if documents are
      read one by one.
    bytes_per_token: bytes of text per token, on average.
    apart: whether a document's tokens are to see no other's.
    masked: whether tokens are signed, as `dialogues.split_signed` takes them;
      of a mix of which some are, those of the others are all positive.
  """

  def __init__(
    self,
    spans: Sequence[DocumentRange],
    tokenizer: Tokenizer,
    run_tokens: int = 0,
    bytes_per_token: float = 1.0,
    apart: bool = True,
    masked: bool = False,
  ):
    self._spans = [span for span in spans if span.tokens]
    self._tokenizer = tokenizer
    self._bounds = np.cumsum([0, *(span.tokens for span in self._spans)])
    self.run_tokens = run_tokens
    self.bytes_per_token = bytes_per_token
    self.apart = apart
    self.masked = masked

  def __len__(self) -> int:
    return int(self._bounds[-1])

  @property
  def documents(self) -> int:
    """Number of documents."""
    return sum(span.stop - span.first for span in self._spans)

  def __getitem__(self, where: slice) -> np.ndarray:
    """Returns int32 [stop - start]; the step must be 1."""
    start, stop, step = where.indices(len(self))
    if step != 1:
      raise ValueError(f'{where}: tokens are read without gaps')
    parts = [np.empty(0, np.int32)]
    for span, begin, first, last in self._within(start, stop):
      parts.append(span.read(first - begin, last - begin, self._tokenizer))
    return np.concatenate(parts)

  def segments(self, start: int, stop: int) -> np.ndarray:
    """Returns the document of each token, int32, counted from the first's."""
    begins = np.zeros(stop - start, np.int32)
    for span, begin, first, last in self._within(start, stop):
      begins[span.begins(first - begin, last - begin) + begin - start] = 1
    begins[:1] = 0
    return np.cumsum(begins, dtype=np.int32)

  def _within(
    self, start: int, stop: int
  ) -> Iterator[tuple[DocumentRange, int, int, int]]:
    """Yields spans, where each begins, and which tokens are in it."""
    k = int(np.searchsorted(self._bounds, start, 'right')) - 1
    while start < stop:
      end = min(stop, int(self._bounds[k + 1]))
      yield self._spans[k], int(self._bounds[k]), start, end
      start, k = end, k + 1


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
