# SPDX-License-Identifier: Apache-2.0
"""Types and rules of the keys of section `data`: what is trained on."""

import dataclasses
import glob
import importlib.util
import math
import os
import pathlib
from collections.abc import Iterator

from diloco.config import own_code
from diloco.config.sections import Count, Section, one_of_or_own
from diloco.data import tokenizers
from diloco.data.sources import (
  FORMATS,
  HELDOUT_PERCENT,
  IN_MEMORY,
  MixtureSource,
  fields_of,
  heldout_bytes,
  is_masked,
  text_files,
)
from diloco.data.tokenizers import TOKENIZERS

MIX = 'mix'
SOURCES = (*IN_MEMORY, *FORMATS, MIX)
BYTES = tokenizers.BYTES.name
HELDOUT_PERCENT_MAX = 50.0


@dataclasses.dataclass(frozen=True)
class DataConfig(Section, section='data'):
  """The section `data`: where tokens come from, how many a step takes."""

  # Bytes held in memory (a key of IN_MEMORY), documents in files of any size (a
  # key of FORMATS), or 'mix': some of these files.
  source: one_of_or_own(SOURCES) = 'stdlib'
  # Of 'text' a file or folder. Of files: one, a folder or a pattern such as
  # /data/train-*.parquet, local or gs://. Of one of your own: what it reads.
  path: str = ''
  # Field, column or feature with a document's text; '' of 'array_record': a
  # record is the text. 'chat:messages': a list of messages;
  # 'prompt+completion': two texts. Of these what is said counts in the loss.
  text_key: str = 'text'
  # Of files: 'bytes', 'sentencepiece:FILE', 'tokenizers:FILE', 'hf:FOLDER'.
  tokenizer: str = 'bytes'
  end_token: str = ''  # Behind each document; '': the tokenizer's own.
  # Of 'mix': 'WEIGHT FORMAT PATH' each, such as '0.7 parquet /data/web'; FORMAT
  # may be FORMAT:TEXT_KEY.
  mix: tuple[str, ...] = ()
  # Held-out documents, of the same format ('mix': as an item of `mix`, its
  # weight is 1); '': the last documents of each file.
  heldout_path: str = ''
  heldout_percent: float = 1.0  # Of each file's documents, without such a path.
  index_path: str = ''  # Local folder of indices of files; '': ~/.cache/diloco.
  # Whether a document's tokens see, and tell, none of another; of files.
  apart: bool = True
  threads: Count = 1  # Of a learner that read ahead.
  seq_len: Count = 128  # Tokens in one sequence.
  batch: Count = 8  # Sequences per learner and inner step.
  shards: Count = 16  # Learner ids that may join; at least M.
  grammar_bytes: Count = 1 << 20  # Length of the text of 'grammar'.

  @property
  def items(self) -> tuple[MixtureSource, ...]:
    """The files that are trained on; none of a source in memory."""
    if self.source == MIX:
      return tuple(mix_item(text, self.text_key) for text in self.mix)
    if self.source in FORMATS:
      return (MixtureSource(self.source, self.path, self.text_key),)
    return ()

  @property
  def batch_keys(self) -> tuple[str, ...]:
    """Keys of a batch: its tokens, the document of each, whether it counts."""
    items = self.items
    masked = any(is_masked(item.text_key) for item in items)
    more = masked or (self.apart and bool(items))
    return ('tokens', *['segments'] * more, *['counted'] * masked)

  @property
  def heldout(self) -> MixtureSource | None:
    """The files that are held out; None: the last documents of `items`."""
    if not self.heldout_path:
      return None
    if self.source == MIX:
      return mix_item(self.heldout_path, self.text_key)
    return MixtureSource(self.source, self.heldout_path, self.text_key)

  def broken_rules(self):
    needed = self.shards * self.batch * self.seq_len + 1
    in_memory = IN_MEMORY.get(self.source)
    is_made = in_memory is not None and in_memory.is_made
    if is_made and self.grammar_bytes < needed:
      yield (
        f'grammar_bytes={self.grammar_bytes}: one batch of each of '
        f'{self.shards} learners takes {needed}'
      )
    yield from self._paths()
    yield from self._tokenizer()
    if not 0 < self.heldout_percent <= HELDOUT_PERCENT_MAX:
      yield (
        f'heldout_percent={self.heldout_percent}: must be above 0, at most '
        f'{HELDOUT_PERCENT_MAX:g}'
      )

  def _paths(self) -> Iterator[str]:
    in_memory = (name for name, s in IN_MEMORY.items() if s.takes_path)
    with_path = (*in_memory, *FORMATS)
    if self.source in with_path and not self.path:
      yield (
        f"path='': data.source={self.source!r} needs the path of a file or "
        'folder'
      )
    is_own = own_code.parts(self.source) is not None
    if self.source not in with_path and self.path and not is_own:
      yield (
        f'path={self.path!r}: is read only with data.source='
        f'{" or ".join(map(repr, with_path))}, not with {self.source!r}'
      )
    if self.source == MIX and not self.mix:
      yield "mix=(): data.source='mix' needs 'WEIGHT FORMAT PATH', …"
    if self.source != MIX and self.mix:
      yield (
        f"mix={self.mix!r}: is read only with data.source='mix', not with "
        f'{self.source!r}'
      )
    if self.source not in (MIX, *FORMATS) and self.heldout_path:
      yield (
        f'heldout_path={self.heldout_path!r}: data.source={self.source!r} '
        'holds out some of its own text'
      )
    if self.source == MIX:
      texts = [*(('mix', text) for text in self.mix)]
      texts.append(('heldout_path', self.heldout_path))
      for key, text in texts:
        if key == 'heldout_path' and not text:
          continue
        try:
          item = mix_item(text, self.text_key)
        except ValueError as error:
          yield f'{key}: {error}'
        else:
          yield from self._key_of(item)
    elif self.source in FORMATS:
      yield from self._key_of(self.items[0])

  def _key_of(self, item: MixtureSource) -> Iterator[str]:
    form, key = FORMATS[item.format], item.text_key
    if form.needs_text_key and not key:
      yield f"text_key='': format {item.format!r} needs the name"
    elif key and (not all(fields_of(key)) or len(fields_of(key)) > 2):
      yield (
        f"text_key={key!r}: must be a name, 'chat:NAME' or 'PROMPT+COMPLETION'"
      )
    if is_masked(key) and not form.needs_text_key:
      yield (
        f'text_key={key!r}: format {item.format!r} has texts only, dialogues '
        f'are in {", ".join(n for n, f in FORMATS.items() if f.needs_text_key)}'
      )

  def _tokenizer(self) -> Iterator[str]:
    kind, _, file = self.tokenizer.partition(':')
    if self.tokenizer != BYTES and not (kind in TOKENIZERS and file):
      yield (
        f'tokenizer={self.tokenizer!r}: must be {BYTES!r} or '
        f"'KIND:PATH', KIND one of {', '.join(TOKENIZERS)}"
      )
    elif self.tokenizer != BYTES and own_code.parts(self.source):
      yield (
        f'tokenizer={self.tokenizer!r}: must be {BYTES!r}, '
        f'data.source={self.source!r} gives tokens, and may give a tokenizer '
        'with them'
      )
    elif self.tokenizer != BYTES and self.source not in (MIX, *FORMATS):
      yield (
        f'tokenizer={self.tokenizer!r}: data.source={self.source!r} is of '
        'bytes; python -m diloco.write_records makes files of a text'
      )
    if self.end_token and self.tokenizer == BYTES:
      yield f"end_token={self.end_token!r}: the end of 'bytes' is byte 0"


def missing_paths(data: DataConfig) -> Iterator[str]:
  """Yields 'key=path: …' for each local path where there is nothing.

  Looks at the file system only: a launcher asks before it starts a process.
  """
  kind, _, file = data.tokenizer.partition(':')
  named = [
    ('path', '' if own_code.parts(data.source) else data.path),
    *(('mix', item.path) for item in data.items if data.source == MIX),
    ('heldout_path', data.heldout.path if data.heldout else ''),
    ('tokenizer', file if kind in TOKENIZERS else ''),
  ]
  for key, path in named:
    exists = not path or '://' in path or glob.glob(os.path.expanduser(path))
    if not exists and not os.path.exists(path):  # A name may hold brackets.
      yield f'data.{key}={path!r}: there is nothing at this path'


def missing_packages(data: DataConfig) -> Iterator[str]:
  """Yields 'key=value: …' for each package that reads the data and is missing.

  Imports none of them.
  """
  kind = data.tokenizer.partition(':')[0]
  needed = {
    f'data.source={data.source!r}': [
      FORMATS[item.format].package
      for item in (*data.items, *filter(None, [data.heldout]))
    ],
    f'data.tokenizer={data.tokenizer!r}': [
      TOKENIZERS[kind].package if kind in TOKENIZERS else ''
    ],
  }
  for where, packages in needed.items():
    for package in filter(None, dict.fromkeys(packages)):
      if importlib.util.find_spec(package) is None:
        how = f'pip install {package}'
        yield f'{where}: the package {package} is missing: {how}'


def text_bytes(data: DataConfig) -> tuple[int, int] | None:
  """Returns how many bytes of a text are trained on, and how many held out.

  Only the sizes of its files are looked at; None where these do not tell.

  Raises:
    OSError: there is no text.
  """
  in_memory = IN_MEMORY.get(data.source)
  if in_memory is None or not in_memory.takes_path:
    return None
  sizes = [file.stat().st_size for file in text_files(pathlib.Path(data.path))]
  held = [heldout_bytes(size) for size in sizes]
  between = len(sizes) - 1  # Bytes that separate files.
  return sum(sizes) - sum(held) + between, sum(held) + between


def too_short_text(data: DataConfig) -> Iterator[str]:
  """Yields 'key=path: …' for a text that can't be trained or evaluated on.

  A launcher asks before it starts a process. Each process asks again, of the
  tokens (`run.spec.check_text`).
  """
  where = f'data.path={data.path!r}'
  try:
    size = text_bytes(data)
  except OSError as error:
    yield f'{where}: {error}'
    return
  if size is None:
    return
  trained, heldout = size
  needed = data.shards * data.batch * data.seq_len + 1
  if trained >= needed and heldout > data.seq_len:
    return
  nbytes = max(
    (needed - 1) * 100 // (100 - HELDOUT_PERCENT) + 1,
    math.ceil((data.seq_len + 1) * 100 / HELDOUT_PERCENT),
  )
  yield (
    f'{where}: {sum(size)} bytes are too short, a text needs {nbytes}: '
    f'one batch of each learner takes {needed} (data.shards={data.shards} * '
    f'data.batch={data.batch} * data.seq_len={data.seq_len} + 1), and '
    f'{HELDOUT_PERCENT} % of each file, at least {data.seq_len + 1} bytes in '
    'all, are held out; give more text, or lower these keys'
  )


def mix_item(text: str, text_key: str) -> MixtureSource:
  """Parses 'WEIGHT FORMAT PATH' or 'WEIGHT FORMAT:TEXT_KEY PATH'.

  Raises:
    ValueError: it has another form.
  """
  words = text.split(maxsplit=2)
  if len(words) < 3:
    raise ValueError(f"{text!r} is not 'WEIGHT FORMAT PATH'")
  format_, colon, key = words[1].partition(':')
  if format_ not in FORMATS:
    raise ValueError(
      f'{text!r}: format {format_!r} must be one of {", ".join(FORMATS)}'
    )
  try:
    weight = float(words[0])
  except ValueError:
    weight = math.nan
  if not 0 < weight < math.inf:
    raise ValueError(f'{text!r}: weight {words[0]!r} must be a number above 0')
  return MixtureSource(format_, words[2], key if colon else text_key, weight)
