# SPDX-License-Identifier: Apache-2.0
"""Frozen dataclasses as JSON files that are never seen half written."""

import dataclasses
import functools
import json
import os
import pathlib
import types
import typing


class Malformed(Exception):
  """A file is not what it should be; says which file and what is wrong."""


def write_json(path: pathlib.Path, value) -> None:
  """Replaces `path` atomically; `value` is a dataclass or plain data."""
  if dataclasses.is_dataclass(value):
    value = dataclasses.asdict(value)
  temporary = path.with_name(f'{path.name}.{os.getpid()}.tmp')
  temporary.write_text(json.dumps(value, indent=1, allow_nan=False) + '\n')
  os.replace(temporary, path)


def read_json(path: pathlib.Path, cls):
  """The `cls` in `path`, or None where there is no such file.

  Raises:
    Malformed: not JSON, a field is missing or unknown, or of another type.
  """
  try:
    text = path.read_text()
  except FileNotFoundError:
    return None
  try:
    return as_type(json.loads(text), cls, cls.__name__)
  except ValueError as error:
    raise Malformed(f'{path}: {error}') from None


def as_type(value, kind, where: str):
  """Plain JSON data as `kind`, such as a dataclass; `where` names it.

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
  # What has a default was added later; older files lack it.
  needed = {f.name for f in fields if f.default is dataclasses.MISSING}
  if odd := sorted((value.keys() - known) | (needed - value.keys())):
    raise ValueError(f'{where}: missing or unknown fields {", ".join(odd)}')
  return cls(
    **{n: as_type(x, kinds[n], f'{where}.{n}') for n, x in value.items()}
  )


@functools.cache
def _kinds(cls) -> dict:
  return typing.get_type_hints(cls)
