# SPDX-License-Identifier: Apache-2.0
"""Records as documents: a text, or what is said with what is to be learned.

Of a conversation and of a prompt with its completion the model learns what it
is to say itself; the rest is context, whose tokens do not count in the loss.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence

import numpy as np

from diloco.data import sources

ASSISTANT = 'assistant'
MESSAGE = '{"role": "user", "content": "…"}'
Messages = tuple[Mapping[str, str], ...]  # Each has 'role' and 'content'.
Parts = list[tuple[str, bool]]  # Pieces of a text, and whether they count.


@dataclasses.dataclass(frozen=True)
class Dialogue:
  """A document of which some counts.

  Attributes:
    messages: of a conversation, which a chat template makes parts of.
    parts: the text itself, where it needs no template.
  """

  messages: Messages = ()
  parts: tuple[tuple[str, bool], ...] = ()


def document_of(record: object, text_key: str) -> bytes | Dialogue:
  """Returns the document of a record.

  Args:
    record: a dict, as a line of JSON or a row of a table has it.
    text_key: see `sources.CHAT`.

  Raises:
    ValueError: it is no dict, or a field is missing or of another type; says
      what would be right.
  """
  names = sources.fields_of(text_key)
  if not isinstance(record, Mapping):
    shape = dict.fromkeys(names, '…')
    raise ValueError(
      f'is a {_type(record)}, must be an object such as '
      f'{json.dumps(shape, ensure_ascii=False)}'
    )
  for name in names:
    if name not in record:
      raise ValueError(
        f'has no {name!r}, which data.text_key={text_key!r} names; '
        f'those there are: {", ".join(map(str, record)) or "none"}'
      )
  if text_key.startswith(sources.CHAT):
    return Dialogue(messages=_messages(record[names[0]], names[0]))
  texts = [_text(record[name], name) for name in names]
  if sources.is_masked(text_key):
    return Dialogue(parts=tuple(zip(texts, (False, True))))
  return texts[0].encode()


def document_of_line(line: bytes, text_key: str) -> bytes | Dialogue:
  """Returns the document of a line.

  Raises:
    ValueError: it is not UTF-8, no JSON, or not such a record.
  """
  try:
    record = json.loads(line.decode().rstrip())
  except UnicodeDecodeError as error:
    raise ValueError(f'is not UTF-8 ({error.reason})') from None
  except json.JSONDecodeError as error:
    raise ValueError(
      f'is no JSON ({error.msg}, column {error.colno}); each line must be an '
      'object'
    ) from None
  return document_of(record, text_key)


def _text(value: object, where: str) -> str:
  if not isinstance(value, str):
    raise ValueError(f'{where!r} is a {_type(value)}, must be a string')
  return value


def _messages(value: object, name: str) -> Messages:
  if not isinstance(value, list) or not value:
    what = 'empty' if value == [] else f'a {_type(value)}'
    raise ValueError(f'{name!r} is {what}, must be a list of {MESSAGE}')
  messages = []
  for i, each in enumerate(value):
    where = f'{name}[{i}]'
    if not isinstance(each, Mapping) or not {'role', 'content'} <= each.keys():
      what = (
        f'has {", ".join(each) or "no keys"}'
        if isinstance(each, Mapping)
        else f'is a {_type(each)}'
      )
      raise ValueError(f'{where} {what}, must be {MESSAGE}')
    if each.get('tool_calls'):
      raise ValueError(f'{where} has tool_calls, which are not read')
    texts = {
      key: _text(each[key], f'{where}.{key}') for key in ('role', 'content')
    }
    messages.append(texts)
  if not any(each['role'] == ASSISTANT for each in messages):
    roles = ', '.join(dict.fromkeys(each['role'] for each in messages))
    raise ValueError(
      f'{name!r} has messages of {roles}, none of {ASSISTANT}: there would be '
      'nothing to learn'
    )
  return tuple(messages)


def _type(value: object) -> str:
  """Returns what JSON calls the type of a value."""
  names = {dict: 'object', list: 'list', str: 'string', type(None): 'null'}
  names |= {bool: 'boolean', int: 'number', float: 'number'}
  return names.get(type(value), type(value).__name__)


def plain_parts(messages: Messages) -> Parts:
  r"""The template of tokenizers without one: 'ROLE: CONTENT\n' a message.

  What follows 'assistant: ' counts.
  """
  parts = []
  for message in messages:
    said = message['role'] == ASSISTANT
    parts.append((f'{message["role"]}: ', False))
    parts.append((f'{message["content"]}\n', said))
  return parts


# Tokens with what counts: a token that does not is there as its complement ~t,
# which is negative. So a digest of tokens is one of both.


def signed(tokens: Sequence[int], counted: bool) -> np.ndarray:
  """Returns int32 tokens, which all count or all do not."""
  tokens = np.asarray(tokens, np.int32)
  return tokens if counted else ~tokens


def split_signed(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the tokens themselves, and which of them count, both int32."""
  counted = tokens >= 0
  return np.where(counted, tokens, ~tokens), counted.astype(np.int32)
