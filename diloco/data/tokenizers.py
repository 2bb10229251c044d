# SPDX-License-Identifier: Apache-2.0
"""Texts to tokens and back: the interface, and the tokenizers by name.

A document's tokens end with the tokenizer's end token, so that documents can be
joined. An empty document has no tokens at all.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from diloco.data import dialogues

# Usual end tokens, if a JSON file does not name one.
ENDS = ('<|endoftext|>', '<|end_of_text|>', '</s>', '<eos>', '<|eos|>', '[SEP]')


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """A tokenizer; made by `make_tokenizer`.

  Attributes:
    name: as in the configuration, such as 'sentencepiece:FILE'.
    vocab: tokens are 0 … vocab - 1, `end` among them.
    end: follows each document.
    fingerprint: hex sha256 of all that determines tokens.
    raw_encode: maps texts in UTF-8 to their tokens, without `end`.
    raw_decode: maps tokens to the bytes of their text.
    exported: its file, as Hugging Face's tools know it: name and content.
    end_text: what `end` is called in that file.
    chat: the chat template: makes parts of messages.
    raw_encode_chat: as `raw_encode`, of what such a template wrote: names of
      special tokens are these; None: there is no template but the plain one.
  """

  name: str
  vocab: int
  end: int
  fingerprint: str
  raw_encode: Callable[[Sequence[bytes]], Sequence[Sequence[int]]]
  raw_decode: Callable[[Sequence[int]], bytes]
  exported: tuple[str, bytes]
  end_text: str
  chat: Callable[[dialogues.Messages], dialogues.Parts] = dialogues.plain_parts
  raw_encode_chat: (
    Callable[[Sequence[bytes]], Sequence[Sequence[int]]] | None
  ) = None

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

  def encode_dialogue(self, dialogue: dialogues.Dialogue) -> np.ndarray:
    """Returns signed tokens, int32, of which `dialogues` says what they are.

    Parts become tokens each by itself, as a prompt does that a model goes on
    from. The end, unless a template wrote it, counts if the last part does.
    """
    parts, raw_encode = dialogue.parts, self.raw_encode
    if dialogue.messages:
      parts = self.chat(dialogue.messages)
      raw_encode = self.raw_encode_chat or raw_encode
    has_template = raw_encode is not self.raw_encode
    parts = [(text, counts) for text, counts in parts if text]
    if not parts:
      return np.empty(0, np.int32)
    encoded = raw_encode([text.encode() for text, _ in parts])
    pieces = [
      dialogues.signed(tokens, counts)
      for tokens, (_, counts) in zip(encoded, parts)
    ]
    last, _ = dialogues.split_signed(np.concatenate(pieces[-2:]))
    if not (has_template and self.end in last):
      pieces.append(dialogues.signed([self.end], parts[-1][1]))
    return np.concatenate(pieces)

  def decode(self, tokens: Sequence[int]) -> bytes:
    """Returns the text of tokens; `end` has none."""
    return self.raw_decode([t for t in tokens if t != self.end])


@contextlib.contextmanager
def needed(what: str) -> Iterator[None]:
  """Wraps imports of packages from the extra `data`.

  Args:
    what: what needs it, such as "data.source='parquet'".

  Raises:
    ValueError: a package is not installed; says how to install it.
  """
  try:
    yield
  except ImportError as error:
    raise ValueError(
      f"{what} needs {error.name or error}: pip install 'diloco[data]'"
    ) from None


def fingerprint(*parts: bytes) -> str:
  """Returns hex sha256 over parts of any length, each with its length."""
  digest = hashlib.sha256()
  for part in parts:
    digest.update(len(part).to_bytes(8, 'little'))
    digest.update(part)
  return digest.hexdigest()


BYTES_END = '\0'


def _byte_level() -> bytes:
  """Returns a tokenizer.json whose token b is byte b, and that merges none.

  Its vocabulary shows bytes as GPT-2's does: those that print as themselves in
  Latin-1, the others as the characters from U+0100 on. Byte 0, the end token,
  is called `BYTES_END`, as in a text: tools take what is called like a special
  token for it, and GPT-2's name of byte 0 is a letter.
  """
  prints = {*range(0x21, 0x7F), *range(0xA1, 0x100)} - {0xAD}
  others = iter(range(0x100, 0x200))
  vocab = {chr(b if b in prints else next(others)): b for b in range(256)}
  vocab = {BYTES_END: 0, **{c: b for c, b in vocab.items() if b}}
  end = {'id': 0, 'content': BYTES_END, 'special': True, 'normalized': False}
  sides = dict.fromkeys(('single_word', 'lstrip', 'rstrip'), False)
  step = {'type': 'ByteLevel', 'add_prefix_space': False, 'use_regex': False}
  step['trim_offsets'] = False
  contents = {
    'version': '1.0',
    'added_tokens': [end | sides],
    'pre_tokenizer': step,
    'decoder': step,
    'model': {'type': 'BPE', 'vocab': vocab, 'merges': []},
  }
  return json.dumps(contents, ensure_ascii=False).encode()


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
  exported=('tokenizer.json', _byte_level()),
  end_text=BYTES_END,
)


# Makes tokenizers by name: 'bytes', or 'KIND:FILE' with a user's file.
#
# sentencepiece:FILE   a model of sentencepiece
# tokenizers:FILE      the JSON file of Hugging Face's tokenizers
# hf:FOLDER            that file, next to tokenizer_config.json and a template


def make_tokenizer(name: str, end: str = '') -> Tokenizer:
  """Returns the tokenizer of that name.

  Args:
    name: 'bytes' or 'KIND:FILE'.
    end: the token after each document; '' takes the tokenizer's own.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: there is no such kind, its package is not installed, the file is
      malformed, or it has no such token.
  """
  kind, _, path = name.partition(':')
  if kind == 'bytes':
    if end:
      raise ValueError(f"data.end_token={end!r}: the end of 'bytes' is byte 0")
    return BYTES
  if kind not in TOKENIZERS:
    raise ValueError(
      f"data.tokenizer={name!r}: must be 'bytes', or 'KIND:PATH' with KIND one "
      f'of {", ".join(TOKENIZERS)}'
    )
  return TOKENIZERS[kind].make(name, path, end)


def _sentencepiece(name: str, path: str, end: str) -> Tokenizer:
  with needed(f'data.tokenizer={name!r}'):
    import sentencepiece
  model = _content(name, path)
  try:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
  except RuntimeError:
    raise _no_file_of(name, 'sentencepiece') from None
  vocab = processor.vocab_size()
  if not end:
    number = processor.eos_id()  # −1: it has none.
  else:
    number = processor.piece_to_id(end)
    if processor.id_to_piece(number) != end:  # It returned the unknown token.
      number = -1
  return Tokenizer(
    name=name,
    vocab=vocab,
    end=_checked_number(number, name, end, "its own ('eos')"),
    fingerprint=fingerprint(b'sentencepiece', model, b'%d' % number),
    raw_encode=lambda texts: processor.encode(unicode_of(texts), num_threads=1),
    raw_decode=lambda tokens: processor.decode(list(map(int, tokens))).encode(),
    exported=('tokenizer.model', model),
    end_text=processor.id_to_piece(number) if number >= 0 else '',
  )


def _tokenizers(name: str, path: str, end: str) -> Tokenizer:
  with needed(f'data.tokenizer={name!r}'):
    import tokenizers
  content = _content(name, path)
  try:
    tokenizer = tokenizers.Tokenizer.from_buffer(content)
  except Exception as error:  # noqa: BLE001  It raises nothing narrower.
    raise _no_file_of(name, 'tokenizers', str(error)) from None
  tokenizer.no_truncation()
  tokenizer.no_padding()
  tokenizer.encode_special_tokens = True  # In a text they are ordinary text.
  tokens = tokenizer.get_vocab(with_added_tokens=True)
  ends = [each for each in (end,) if each] or ENDS
  number = next((tokens[each] for each in ends if each in tokens), -1)

  return Tokenizer(
    name=name,
    vocab=max(tokens.values()) + 1,
    end=_checked_number(number, name, end, f'one of {", ".join(ENDS)}'),
    fingerprint=fingerprint(b'tokenizers', content, b'%d' % number),
    raw_encode=_batch_encoder(tokenizer),
    raw_decode=lambda ids: tokenizer.decode(
      list(map(int, ids)), skip_special_tokens=False
    ).encode(),
    exported=('tokenizer.json', content),
    end_text=tokenizer.id_to_token(number) if number >= 0 else '',
  )


def _hf(name: str, path: str, end: str) -> Tokenizer:
  """Of a folder as Hugging Face's models have it: its end, and its template."""
  folder = pathlib.Path(path).expanduser()
  file = folder / 'tokenizer.json'
  if not file.is_file():
    raise FileNotFoundError(
      f'data.tokenizer={name!r}: there is no file {str(file)!r}; '
      "'sentencepiece:FILE' takes a tokenizer.model"
    )
  config = _settings(folder / 'tokenizer_config.json')
  special = {
    key: value if isinstance(value, str) else value['content']
    for key, value in config.items()
    if key in ('bos_token', 'eos_token', 'unk_token', 'pad_token') and value
  }
  made = _tokenizers(name, str(file), end or special.get('eos_token', ''))
  template = config.get('chat_template')
  if isinstance(template, list):  # Several, with names.
    template = {each['name']: each['template'] for each in template}['default']
  own = folder / 'chat_template.jinja'
  if own.is_file():
    template = own.read_text()
  if not template:
    return made
  from diloco.data import chat_templates  # It takes from here.

  with needed(f'data.tokenizer={name!r}'):
    import tokenizers
  marked = tokenizers.Tokenizer.from_file(str(file))
  marked.no_truncation()
  marked.no_padding()
  told = json.dumps(special, sort_keys=True).encode()
  where = f'the chat template of data.tokenizer={name!r}'
  return dataclasses.replace(
    made,
    fingerprint=fingerprint(made.fingerprint.encode(), template.encode(), told),
    chat=chat_templates.compiled(template, where, special),
    raw_encode_chat=_batch_encoder(marked),
  )


def _settings(path: pathlib.Path) -> dict:
  try:
    return json.loads(path.read_text()) if path.is_file() else {}
  except ValueError as error:
    raise ValueError(f'{path}: is no JSON ({error})') from None


def _batch_encoder(tokenizer) -> Callable[[Sequence[bytes]], list[list[int]]]:
  def encode(texts: Sequence[bytes]) -> list[list[int]]:
    encoded = tokenizer.encode_batch(
      unicode_of(texts), add_special_tokens=False
    )
    return [each.ids for each in encoded]

  return encode


def train_bpe(documents: Iterable[str], vocab: int) -> bytes:
  """Returns the JSON of a byte-level BPE that is trained on the documents.

  The same documents give the same bytes. Any text has tokens.

  Args:
    vocab: tokens at most; a small text gives fewer.

  Raises:
    ValueError: the package tokenizers is not installed.
  """
  with needed('a tokenizer that is trained'):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab,
    special_tokens=[ENDS[0]],
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  tokenizer.train_from_iterator(documents, trainer)
  return tokenizer.to_str(pretty=True).encode()


def _content(name: str, path: str) -> bytes:
  file = pathlib.Path(path)
  if not file.is_file():
    raise FileNotFoundError(
      f'data.tokenizer={name!r}: there is no file {path!r}'
    )
  return file.read_bytes()


def _no_file_of(name: str, package: str, why: str = '') -> ValueError:
  more = f' ({why})' if why else ''
  return ValueError(f'data.tokenizer={name!r}: no file of {package}{more}')


def _checked_number(number: int, name: str, end: str, own: str) -> int:
  if number < 0:
    raise ValueError(
      f'data.end_token={end!r}: {name!r} has no such token'
      if end
      else f"data.end_token='': {name!r} has no token that ends a document, "
      f'such as {own}; name the one to take'
    )
  return number


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of tokenizers that users have in files.

  Attributes:
    make: takes the whole name, the path and the end token.
    package: that reads it.
  """

  make: Callable[[str, str, str], Tokenizer]
  package: str


TOKENIZERS = {
  'sentencepiece': Kind(_sentencepiece, 'sentencepiece'),
  'tokenizers': Kind(_tokenizers, 'tokenizers'),
  'hf': Kind(_hf, 'tokenizers'),
}
