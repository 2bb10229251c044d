# SPDX-License-Identifier: Apache-2.0
"""Writes frozen dataclasses as JSON files, atomically.

A JSON object may be sealed: its last key, `check`, is then the CRC-32 of the
text without that key, so that one changed bit is noticed.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import types
import typing
import zlib
from collections.abc import Callable

UNFINISHED = '.tmp'  # Suffix of a file that is still being written.
_SEAL = b', "check": "'
_SEAL_BYTES = len(_SEAL) + 8 + len(b'"}')


class MalformedFile(Exception):
  """A malformed file; says which file and what is wrong."""


def seal(text: bytes) -> bytes:
  """Returns the JSON object `text`, which is not empty, with its checksum."""
  return b'%s%s%08x"}' % (text[:-1], _SEAL, zlib.crc32(text))


def unseal(data: bytes) -> bytes | None:
  """Returns what `seal` was given; None if `data` has no seal.

  Raises:
    ValueError: the checksum is wrong.
  """
  text, mark = data[:-_SEAL_BYTES] + b'}', data[-_SEAL_BYTES:]
  if not mark.startswith(_SEAL):
    return None
  if seal(text) != data:
    raise ValueError(f'has the checksum {zlib.crc32(text):08x}, not {mark!r}')
  return text


def replace(
  path: pathlib.Path,
  data: bytes,
  sync: bool = False,
  previous: pathlib.Path | None = None,
) -> None:
  """Replaces `path` atomically; a failed write leaves nothing behind.

  Args:
    sync: True flushes bytes and name to the disk before returning, so that they
      survive a loss of power; otherwise only the end of the process.
    previous: where the old contents of `path` are kept. If a process dies in
      between, this is all that there is.

  Raises:
    OSError: it could not be written; `path` holds what it held.
  """
  temporary = path.with_name(f'{path.name}.{os.getpid()}{UNFINISHED}')
  try:
    with temporary.open('wb') as file:
      file.write(data)
      if sync:
        file.flush()
        os.fsync(file.fileno())
    if previous is not None and path.exists():
      os.replace(path, previous)
    os.replace(temporary, path)
  except OSError:
    temporary.unlink(missing_ok=True)
    raise
  if sync:
    folder = os.open(path.parent, os.O_RDONLY)
    try:
      os.fsync(folder)
    finally:
      os.close(folder)


def plain(value):
  """Returns `value` with dicts in place of dataclasses, for JSON.

  Like `dataclasses.asdict`, which also copies each string and number: at a
  syncer of many learners that is most of what a line costs.
  """
  if hasattr(value, '__dataclass_fields__'):
    return {x: plain(getattr(value, x)) for x in value.__dataclass_fields__}
  if isinstance(value, dict):
    return {key: plain(item) for key, item in value.items()}
  if isinstance(value, tuple | list):
    return [plain(item) for item in value]
  return value


def write_json(path: pathlib.Path, value) -> None:
  """Replaces `path` atomically; `value` is a dataclass or plain data."""
  text = json.dumps(plain(value), indent=1, allow_nan=False) + '\n'
  replace(path, text.encode())


def read_json(
  path: pathlib.Path, cls, convert: Callable[[object], object] | None = None
):
  """Returns the `cls` in `path`, or None if there is no such file.

  Args:
    convert: makes the present fields of what an older version wrote.

  Raises:
    MalformedFile: not JSON, a field is missing or unknown, or of another type.
  """
  try:
    data = path.read_bytes().rstrip()
  except FileNotFoundError:
    return None
  try:
    text = unseal(data)
    value = json.loads(data if text is None else text)
    if convert is not None:
      value = convert(value)
    return as_type(value, cls, cls.__name__)
  except ValueError as error:
    raise MalformedFile(f'{path}: {error}') from None


def finite(value, instead: Callable[[float], object] = lambda _: None):
  """Replaces the numbers that JSON does not have, in dicts and sequences.

  Args:
    instead: returns what stands for an infinity or NaN; by default None.
  """
  match value:
    case dict():
      return {key: finite(item, instead) for key, item in value.items()}
    case list() | tuple():
      return [finite(item, instead) for item in value]
    case float() if not math.isfinite(value):
      return instead(value)
  return value


def as_type(value, kind, where: str):
  """Converts plain JSON data to `kind`, such as a dataclass; `where` names it.

  Raises:
    ValueError: a field is missing or unknown, or of another type.
  """
  if dataclasses.is_dataclass(kind):
    return _as_dataclass(value, kind, where)
  origin, arguments = typing.get_origin(kind), typing.get_args(kind)
  if origin is types.UnionType:  # `X | None`, the only union in use.
    return None if value is None else as_type(value, arguments[0], where)
  if origin is tuple:
    if not isinstance(value, list):
      raise ValueError(f'{where}={value!r}: expected a list')
    return tuple(
      as_type(item, arguments[0], f'{where}[{i}]')
      for i, item in enumerate(value)
    )
  if kind is float and type(value) is int:
    return float(value)
  if type(value) is not kind:
    raise ValueError(f'{where}={value!r}: expected {kind.__name__}')
  return value


def _as_dataclass(value, cls, where: str):
  if not isinstance(value, dict):
    raise ValueError(f'{where}={value!r}: expected an object')
  kinds = _kinds(cls)
  fields = dataclasses.fields(cls)
  known = {field.name for field in fields}
  # A field with a default was added later; older files lack it.
  needed = {f.name for f in fields if f.default is dataclasses.MISSING}
  if odd := sorted((value.keys() - known) | (needed - value.keys())):
    raise ValueError(f'{where}: missing or unknown fields {", ".join(odd)}')
  return cls(
    **{n: as_type(x, kinds[n], f'{where}.{n}') for n, x in value.items()}
  )


@functools.cache
def _kinds(cls) -> dict:
  return typing.get_type_hints(cls)
