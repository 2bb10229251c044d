# SPDX-License-Identifier: Apache-2.0
"""The codec of the control plane gives back what it took, or says why not."""

import dataclasses
import math
import typing

import msgpack
import pytest

from diloco.protocol import (
  host_messages,
  messages,
  shard_messages,
  slice_messages,
)
from diloco.transport import wire

ALL = tuple(
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
PART = messages.Part(nbytes=6, crc=1)
PAYLOAD = messages.Payload(
  handle=7, codec='int4', nbytes=12, crc=1, parts=(PART, PART)
)
EXAMPLES = {
  tuple[messages.Payload, ...]: (PAYLOAD, PAYLOAD),
  tuple[messages.Part, ...]: (PART, PART),
  tuple[messages.Fetched, ...]: (messages.Fetched(1, 2, 3, 0.5, 0.25),),
  tuple[shard_messages.Recipient, ...]: (shard_messages.Recipient(1, 2, 3),),
  tuple[shard_messages.HostParts, ...]: (
    shard_messages.HostParts(1, 2, (PART, PART), (3, 4)),
  ),
  tuple[tuple[int, ...], ...]: ((1, 2), (), (3,)),
  tuple[str, ...]: ('grpc://a/1', ''),
  int: 1 << 40,
  float: 0.125,
  str: 'Θ of a run',
  bool: True,
  tuple[int, ...]: (0, -1, (1 << 62) - 1),
  tuple[float, ...]: (0.25, -0.75),
  dict[str, str]: {'config': 'c0ffee', 'layout': ''},
}


def example(cls: type):
  """A message of this kind with something in each field."""
  hints = typing.get_type_hints(cls)
  return cls(
    **{
      name: example(hint) if dataclasses.is_dataclass(hint) else EXAMPLES[hint]
      for name, hint in hints.items()
    }
  )


EVERY_MESSAGE = tuple(example(cls) for cls in ALL)
REPORT = example(messages.Report)


def body_of(message) -> list:
  return msgpack.unpackb(wire.encode(message))


@pytest.mark.parametrize(
  'message', EVERY_MESSAGE, ids=lambda m: type(m).__name__
)
def test_wire_round_trip(message):
  assert wire.decode(wire.encode(message), ALL) == message


def test_wire_carries_a_diverged_loss():
  report = dataclasses.replace(REPORT, loss=math.nan)
  assert math.isnan(wire.decode(wire.encode(report), ALL).loss)


def test_wire_writes_a_whole_number_as_float():
  report = dataclasses.replace(REPORT, loss=3)
  assert type(wire.decode(wire.encode(report), ALL).loss) is float


@pytest.mark.parametrize(
  ('cls', 'change', 'named'),
  [
    (
      messages.Report,
      {'step_s': math.nan},
      'Report: step_s: nan is not finite',
    ),
    (messages.Report, {'step_s': 1}, 'Report: step_s: 1 is no float'),
    (messages.Report, {'step': True}, 'Report: step: True is no int'),
    (messages.Report, {'step': 1.0}, 'Report: step: 1.0 is no int'),
    (messages.Report, {'step': None}, 'Report: step: None is no int'),
    (messages.Report, {'surprise': 1}, "Report: unknown field 'surprise'"),
    (
      messages.Report,
      {'fetched': {}},
      'Report: fetched: a container is no list',
    ),
    (
      messages.Report,
      {'fetched': [5]},
      'Report: fetched: fields are 5, not a map',
    ),
    (messages.Hello, {'versions': [1, 'x']}, "versions: 'x' is no int"),
    (
      messages.Hello,
      {'fingerprints': {'a': 1}},
      'Hello: fingerprints: 1 is no str',
    ),
    (messages.Hello, {'run': b'x'}, "Hello: run: b'x' is no str"),
    (messages.Offer, {'payload': 5}, 'Offer: payload: fields are 5, not a map'),
    (
      messages.Offer,
      {'payload': {}},
      'Offer: payload: field handle is missing',
    ),
  ],
)
def test_wire_names_the_field_that_is_wrong(cls, change, named):
  kind, fields = body_of(example(cls))
  with pytest.raises(wire.MalformedMessage, match='from learner 3: ') as caught:
    wire.decode(msgpack.packb([kind, {**fields, **change}]), ALL, 'learner 3')
  assert named in str(caught.value)


@pytest.mark.parametrize(
  ('data', 'named'),
  [
    (b'', 'not one msgpack value'),
    (msgpack.packb(['Ready', {}]) + b'\0', 'not one msgpack value'),
    (msgpack.packb(['Ready', {}])[:-1], 'not one msgpack value'),
    (msgpack.packb(['Ready']), 'not [kind, fields]'),
    (msgpack.packb({'Ready': {}}), 'not [kind, fields]'),
    (msgpack.packb(['Payload', {}]), "unknown kind 'Payload'"),
    (msgpack.packb([['Ready'], {}]), 'unknown kind a container'),
    (b'\x92\xa5Ready\x82\xa1a\x01\xa1a\x01', 'a key comes twice'),
    (b'\x91' * 5000, 'nested too deep'),
    (bytes(wire.MESSAGE_BYTES_MAX + 1), '1048577 bytes, at most 1048576'),
  ],
)
def test_wire_refuses(data, named):
  with pytest.raises(wire.MalformedMessage) as caught:
    wire.decode(data, ALL)
  assert named in str(caught.value)


def test_wire_refuses_a_message_of_the_other_side():
  with pytest.raises(
    wire.MalformedMessage, match='Done may not come from there'
  ):
    wire.decode(wire.encode(example(messages.Done)), messages.FROM_LEARNER)


@pytest.mark.parametrize(
  'broken',
  [
    dataclasses.replace(REPORT, step=1.5),
    dataclasses.replace(REPORT, fetched=[1]),
    dataclasses.replace(REPORT, step=1 << 62),
    messages.Goodbye(reason='\ud800'),
    example(messages.Payload),
  ],
  ids=['float', 'list', 'large', 'surrogate', 'no message'],
)
def test_wire_encode_refuses_our_own_mistakes(broken):
  with pytest.raises(TypeError):
    wire.encode(broken)


def test_wire_encode_refuses_what_is_too_large():
  with pytest.raises(ValueError, match='WantFragment has'):
    wire.encode(
      messages.WantFragment(fragment=1, reason='x' * wire.MESSAGE_BYTES_MAX)
    )
