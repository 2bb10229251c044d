# SPDX-License-Identifier: Apache-2.0
"""Seeded messages that no honest learner sends, and how each was made."""

import dataclasses
import random
import typing

import msgpack

from diloco.protocol import messages
from diloco.transport import wire

STRANGE = (
  None, True, -1, 0, 1.5, float('nan'), float('inf'), 1 << 63, '', 'x' * 300,
  b'\0', [], [[]], {}, {'a': 1}, [1, 'two'], {'handle': None},
)  # fmt: skip
EXTREME = {
  int: (wire.INTS[0], -1, 0, 1, 7, wire.INTS[-1]),
  float: (-1.0, -0.0, 0.0, 1e-300, 1e300),
  str: ('', 'int4', 'Θ', '\0', 'x' * 2000),
  bool: (False, True),
}
KINDS = (
  'noise', 'cut', 'flipped', 'grown', 'confused', 'fields', 'nested',
  'bare', 'another side', 'replayed hello', 'extreme', 'oversized',
)  # fmt: skip
_OVERSIZED_EVERY = 100  # They take a millisecond each.


def extreme(cls: type, rng: random.Random):
  """A message of this kind that the wire lets through, with any figures."""

  def value(hint):
    if dataclasses.is_dataclass(hint):
      return extreme(hint, rng)
    if typing.get_origin(hint) is tuple:
      item = typing.get_args(hint)[0]
      return tuple(value(item) for _ in range(rng.randrange(4)))
    if hint == dict[str, str]:
      return {value(str): value(str) for _ in range(rng.randrange(3))}
    return rng.choice(EXTREME[hint])

  hints = typing.get_type_hints(cls)
  return cls(**{name: value(hint) for name, hint in hints.items()})


def bodies(seed: int, count: int) -> typing.Iterator[tuple[str, bytes]]:
  """`count` times the name of a kind and a body of it."""
  rng = random.Random(seed)
  common = [kind for kind in KINDS if kind != 'oversized']
  for index in range(count):
    kind = rng.choice(common)
    if index % _OVERSIZED_EVERY == _OVERSIZED_EVERY - 1:
      kind = 'oversized'
    yield kind, _body(kind, rng)


def _body(kind: str, rng: random.Random) -> bytes:
  cls = rng.choice(messages.FROM_LEARNER)
  good = bytearray(wire.encode(extreme(cls, rng)))
  match kind:
    case 'noise':
      return rng.randbytes(rng.randrange(64))
    case 'cut':
      return bytes(good[: rng.randrange(len(good))])
    case 'flipped':
      for _ in range(rng.randint(1, 8)):
        good[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
      return bytes(good)
    case 'grown':
      at = rng.randint(0, len(good))
      good[at:at] = rng.randbytes(rng.randint(1, 8))
      return bytes(good)
    case 'confused' | 'fields':
      return _changed(kind, good, rng)
    case 'bare':
      return msgpack.packb(rng.choice((None, 7, 'Ready', ['Ready'], {})))
    case 'nested':
      return rng.choice((b'\x91', b'\x81\xa0')) * rng.randrange(1, 5000)
    case 'another side':
      return wire.encode(extreme(rng.choice(messages.FROM_SYNCER), rng))
    case 'replayed hello':
      return wire.encode(extreme(messages.Hello, rng))
    case 'extreme':
      return bytes(good)
    case 'oversized':
      return rng.randbytes(wire.MESSAGE_BYTES_MAX + rng.randint(1, 1000))
  raise AssertionError(kind)


def _changed(kind: str, good: bytes, rng: random.Random) -> bytes:
  """Makes one field of another type, or one too few, too many, or twice."""
  name, fields = msgpack.unpackb(good)
  if fields and kind == 'confused':
    fields[rng.choice(sorted(fields))] = rng.choice(STRANGE)
  elif fields and rng.random() < 0.5:
    del fields[rng.choice(sorted(fields))]
  else:
    fields[rng.choice(('surprise', '__class__', ''))] = rng.choice(STRANGE)
  if rng.random() < 0.1:
    name = rng.choice((None, 7, 'Payload', 'object', [name]))
  return msgpack.packb([name, fields])


def largest(
  cls: type, base, nbytes: int
) -> typing.Iterator[tuple[str, object]]:
  """Messages of this kind, near `nbytes` long, and what each is like.

  Args:
    cls: one of `messages.FROM_LEARNER`.
    base: a message of it that would do; its other fields stay.
    nbytes: that no body exceeds.
  """
  for name, hint in typing.get_type_hints(cls).items():
    if hint in (int, float):
      for value in EXTREME[hint]:
        yield f'{name}={value}', dataclasses.replace(base, **{name: value})
    elif hint is messages.World:
      for value in EXTREME[int]:
        world = messages.World(value, value, reformed=True)
        yield f'{name}={value}', dataclasses.replace(base, world=world)
    elif hint is not bool:
      yield f'long {name}', _longest(base, name, hint, nbytes)


def _longest(base, name: str, hint, nbytes: int):
  """`base` with as long a field `name` as fits, but for some bytes."""

  def grown(count: int):
    return dataclasses.replace(base, **{name: _grown(hint, count)})

  def size(count: int) -> int:
    fields = dataclasses.asdict(grown(count))
    return len(msgpack.packb([type(base).__name__, fields]))

  more = (size(3000) - size(2000)) // 1000  # Bytes of each.
  return grown((nbytes - size(1000)) // more + 1000 - 4)


def _grown(hint, count: int):
  if hint is str:
    return 'x' * count
  if typing.get_origin(hint) is dict:
    return {f'{i:07}': '' for i in range(count)}
  if typing.get_origin(hint) is tuple:
    item = typing.get_args(hint)[0]
    one = {int: 1 << 31, str: 'memory://x/1', messages.Fetched: _FETCHED}.get(
      item
    )
    return (one if one is not None else _PAYLOAD,) * count
  return dataclasses.replace(_PAYLOAD, parts=(messages.Part(1, 1),) * count)


_FETCHED = messages.Fetched(1, 0, 1, fetch_s=0.5, held_s=0.5)
_PAYLOAD = messages.Payload(handle=1, codec='int4', nbytes=10, crc=1)
