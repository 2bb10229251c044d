# SPDX-License-Identifier: Apache-2.0
"""Serialises messages of the control plane, and parses them strictly.

A message is msgpack of `[kind, {field: value}]`. Kinds, fields and types are
derived from the dataclasses of `protocol/messages.py` and, between the shards
of a syncer, of `protocol/shard_messages.py`; whatever does not match them
exactly is `MalformedMessage`, so that code behind this module sees valid
messages only.
"""

import dataclasses
import functools
import math
import operator
import typing
from collections.abc import Callable, Iterable

import msgpack

from diloco.protocol import (
  host_messages,
  messages,
  shard_messages,
  slice_messages,
)

MESSAGE_BYTES_MAX = 1 << 20  # Control plane only; arrays go elsewhere.
# A syncer forwards some messages inside a message of its own, to a learner or a
# shard: incoming ones must leave room for that.
ENVELOPE_BYTES = 1 << 12
INCOMING_BYTES_MAX = MESSAGE_BYTES_MAX - ENVELOPE_BYTES
# The valid range of an int: one more than a peer's integer, or twice that, can
# still be sent.
INTS = range(-(1 << 62), 1 << 62)
# A loss may have diverged; every other number must be finite.
_MAY_DIVERGE = frozenset({(messages.Report, 'loss')})

# All message classes, and their union type.
_ALL = tuple(
  dict.fromkeys(
    (
      *messages.FROM_LEARNER,
      *messages.FROM_SYNCER,
      *shard_messages.FROM_SHARD,
      *shard_messages.FROM_LEAD,
      *host_messages.FROM_LEADING_HOST,
      *host_messages.FROM_OTHER_HOSTS,
      *slice_messages.FROM_AGENT,
      *slice_messages.FROM_RENDEZVOUS,
    )
  )
)
Message = functools.reduce(operator.or_, _ALL)
# Messages to a syncer.
_INCOMING = frozenset((*messages.FROM_LEARNER, *shard_messages.FROM_SHARD))


# Flaws of a message, counted by the server. The last two are found by the
# session: out of order, and after the session's end.
FLAWS = (
  'oversized',
  'no msgpack',
  'no message',
  'unknown kind',
  'wrong side',
  'wrong field',
  'wrong order',
  'too late',
)


class MalformedMessage(ValueError):
  """Bytes that are not a message, or not one that this sender may send.

  Attributes:
    flaw: one of `FLAWS`.
  """

  def __init__(self, flaw: str, text: str):
    assert flaw in FLAWS, flaw
    self.flaw = flaw
    super().__init__(text)


class _Wrong(Exception):  # Turned into Malformed or TypeError.
  """A value that does not fit its field, or what `flaw` says."""

  def __init__(self, text: str, flaw: str = 'wrong field'):
    self.flaw = flaw
    super().__init__(text)


def encode(message: Message) -> bytes:
  """Returns the bytes of `message`.

  Raises:
    TypeError: a field does not hold what its annotation says (a bug here).
    ValueError: the message is larger than `MESSAGE_BYTES_MAX`, or one to a
      syncer larger than `INCOMING_BYTES_MAX`.
  """
  kind = type(message).__name__
  if _KINDS.get(kind) is not type(message):
    raise TypeError(f'not a message: {message!r}')
  try:
    fields = _RECORDS[type(message)](message, False)
  except _Wrong as wrong:
    raise TypeError(f'{kind}: {wrong}') from wrong
  data = msgpack.packb([kind, fields])
  bytes_max = _bytes_max(type(message))
  if len(data) > bytes_max:
    raise ValueError(f'{kind} has {len(data)} bytes, at most {bytes_max}')
  return data


def _bytes_max(kind: type) -> int:
  return INCOMING_BYTES_MAX if kind in _INCOMING else MESSAGE_BYTES_MAX


def decode(
  data: bytes, allowed: Iterable[type], sender: str = 'the peer'
) -> Message:
  """Returns the message in `data`.

  Args:
    allowed: the kinds that this sender may send, such as `FROM_LEARNER`.

  Raises:
    Malformed: `data` is anything but exactly one such message.
  """
  try:
    return _decode(data, tuple(allowed))
  except _Wrong as wrong:
    raise MalformedMessage(wrong.flaw, f'from {sender}: {wrong}') from wrong


def _decode(data: bytes, allowed: tuple[type, ...]) -> Message:
  if len(data) > MESSAGE_BYTES_MAX:
    raise _Wrong(f'{len(data)} bytes, at most {MESSAGE_BYTES_MAX}', 'oversized')
  try:
    body = msgpack.unpackb(data, object_pairs_hook=_dict_of)
  except msgpack.StackError as error:
    raise _Wrong('nested too deep', 'no msgpack') from error
  except (msgpack.UnpackException, ValueError, TypeError) as error:
    raise _Wrong(
      f'not one msgpack value: {error or repr(error)}', 'no msgpack'
    ) from error
  if type(body) is not list or len(body) != 2:
    raise _Wrong('not [kind, fields]', 'no message')
  kind, fields = body
  cls = _KINDS.get(kind) if type(kind) is str else None
  if cls is None:
    raise _Wrong(f'unknown kind {_short(kind)}', 'unknown kind')
  if cls not in allowed:
    raise _Wrong(f'{kind} may not come from there', 'wrong side')
  if len(data) > _bytes_max(cls):
    text = f'{kind}: {len(data)} bytes, at most {_bytes_max(cls)}'
    raise _Wrong(text, 'oversized')
  try:
    return _RECORDS[cls](fields, True)
  except _Wrong as wrong:
    raise _Wrong(f'{kind}: {wrong}') from wrong


def _dict_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
  """Returns a dict; raises if a key comes twice: neither could be chosen."""
  fields = dict(pairs)
  if len(fields) != len(pairs):
    raise _Wrong('a key comes twice', 'no message')
  return fields


# Converts the values of one annotation: from a message if `reading` is False,
# otherwise from what msgpack gives, and checks them.
_Convert = Callable[[object, bool], object]


def _record(cls: type) -> _Convert:
  hints = typing.get_type_hints(cls)
  fields = {
    field.name: _field(hints[field.name], (cls, field.name) in _MAY_DIVERGE)
    for field in dataclasses.fields(cls)
  }

  def convert(value, reading):
    if not reading:
      if type(value) is not cls:
        raise _Wrong(f'{_short(value)} is no {cls.__name__}')
      value = vars(value)
    elif type(value) is not dict:
      raise _Wrong(f'fields are {_short(value)}, not a map')
    elif unknown := sorted(value.keys() - fields.keys()):
      raise _Wrong(f'unknown field {_short(unknown[0])}')
    done = {}
    for name, field in fields.items():
      if name not in value:
        raise _Wrong(f'field {name} is missing')
      try:
        done[name] = field(value[name], reading)
      except _Wrong as wrong:
        raise _Wrong(f'{name}: {wrong}') from wrong
    return cls(**done) if reading else done

  return convert


def _field(annotation, may_diverge: bool = False) -> _Convert:
  if dataclasses.is_dataclass(annotation):
    return _record(annotation)
  if annotation is float:
    return functools.partial(_float, may_diverge)
  if annotation in (int, str, bool):
    return functools.partial(_scalar, annotation)
  origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
    return functools.partial(_tuple, _field(arguments[0], may_diverge))
  if annotation == dict[str, str]:
    return _text_map
  raise TypeError(f'no rule for a field of type {annotation!r}')


def _scalar(cls: type, value, reading: bool):
  del reading
  if type(value) is not cls:  # isinstance would accept a bool as an int.
    raise _Wrong(f'{_short(value)} is no {cls.__name__}')
  if cls is int and value not in INTS:
    raise _Wrong(f'{value} is not between ±2⁶²')
  if cls is str:
    try:
      value.encode()
    except UnicodeEncodeError as error:
      raise _Wrong('text that is no UTF-8') from error
  return value


def _float(may_diverge: bool, value, reading: bool):
  if not reading and type(value) is int and abs(value) <= 1 << 53:
    value = float(value)  # Exact: `loss=0` is valid.
  if type(value) is not float:
    raise _Wrong(f'{_short(value)} is no float')
  if not may_diverge and not math.isfinite(value):
    raise _Wrong(f'{value} is not finite')
  return value


def _tuple(item: _Convert, value, reading: bool):
  """Converts a tuple, which is a list in msgpack."""
  source, wanted = (list, tuple) if reading else (tuple, list)
  if type(value) is not source:
    raise _Wrong(f'{_short(value)} is no {source.__name__}')
  return wanted(item(entry, reading) for entry in value)


def _text_map(value, reading: bool):
  if type(value) is not dict:
    raise _Wrong(f'{_short(value)} is no map')
  return {
    _scalar(str, key, reading): _scalar(str, entry, reading)
    for key, entry in value.items()
  }


def _short(value: object) -> str:
  """Returns the value as an error may show it: a peer chose its length."""
  text = repr(value) if not isinstance(value, list | dict) else 'a container'
  return text if len(text) <= 64 else f'{text[:60]}…'


_KINDS = {cls.__name__: cls for cls in _ALL}
_RECORDS = {cls: _record(cls) for cls in _ALL}
