# SPDX-License-Identifier: Apache-2.0
"""Reads one field of a tf.train.Example, without TensorFlow or generated code.

Only this part of the protobuf wire format is parsed, by field number:
  Example {1: Features}, Features {1: entry}, entry {1: key, 2: Feature},
  Feature {1: BytesList}, BytesList {1: bytes}.
"""

from collections.abc import Iterator


def bytes_field(record: bytes, name: str) -> bytes:
  """Returns the first value of the feature `name`.

  Raises:
    ValueError: the record is not an Example, or has no such feature of bytes;
      says which it has.
  """
  names = []
  wanted = name.encode()
  for features in _fields(memoryview(record), 1):
    for entry in _fields(features, 1):
      key = bytes(next(_fields(entry, 1), b''))
      names.append(key.decode(errors='replace'))
      if key == wanted:
        for feature in _fields(entry, 2):
          for values in _fields(feature, 1):
            for value in _fields(values, 1):
              return bytes(value)
  has = ', '.join(sorted(set(names))) or 'none'
  raise ValueError(f'no feature {name!r} of bytes; those there are: {has}')


def _fields(message: memoryview, number: int) -> Iterator[memoryview]:
  """Yields the length-delimited fields of that number."""
  at, end = 0, len(message)
  while at < end:
    tag, at = _varint(message, at)
    match tag & 7:
      case 0:
        _, at = _varint(message, at)
      case 1:
        at += 8
      case 5:
        at += 4
      case 2:
        size, at = _varint(message, at)
        if at + size > end:
          raise ValueError('is no tf.train.Example: it ends too soon')
        if tag >> 3 == number:
          yield message[at : at + size]
        at += size
      case kind:
        raise ValueError(f'is no tf.train.Example: a field of type {kind}')
  if at != end:
    raise ValueError('is no tf.train.Example: it ends too soon')


def _varint(message: memoryview, at: int) -> tuple[int, int]:
  """Returns a number of seven bits a byte, low ones first, and its end."""
  value = shift = 0
  while at < len(message):
    byte = message[at]
    value |= (byte & 0x7F) << shift
    at, shift = at + 1, shift + 7
    if byte < 0x80:
      return value, at
    if shift > 63:
      break
  raise ValueError('is no tf.train.Example: a number does not end')
