# SPDX-License-Identifier: Apache-2.0
"""Whatever a member says, at its largest: the syncer lives, and says why not.

Through the real server and the real machine; what one learner says and another
is told of must reach it, or be refused where it came from.
"""

import dataclasses

import msgpack
import pytest

from diloco.protocol import messages
from diloco.transport import wire
from tests.siege import malice
from tests.syncer.spoken import REPORT, Stage

pytestmark = pytest.mark.beside

BASES = {
  messages.Ready: messages.Ready(0, 'the test'),
  messages.Report: dataclasses.replace(REPORT, step=2, rows=2),
  messages.Alive: messages.Alive(),
  messages.WantFragment: messages.WantFragment(0, ''),
  messages.HandedIn: messages.HandedIn(1),
  messages.FragmentHeld: messages.FragmentHeld(0, 0, 1),
  messages.NoFragment: messages.NoFragment(0, ''),
  messages.Leaving: messages.Leaving(),
  messages.WantState: messages.WantState(''),
  messages.StateTaken: messages.StateTaken(),
  messages.Goodbye: messages.Goodbye(''),
}


def _base(stage: Stage, kind: type):
  """A message of this kind that does no harm."""
  config = stage.run_spec.config.protocol
  found = messages.Payload(handle=1, codec='f32', nbytes=8, crc=1)
  fragments = (0,) * config.fragments
  match kind:
    case messages.Offer:
      return messages.Offer(1, config.fragment_of(1), 0, 2, 16, 2, found)
    case messages.FragmentOffered:
      return messages.FragmentOffered(0, 0, found, 1)
    case messages.StateOffered:
      payloads = (found,) * (config.fragments + 1)
      return messages.StateOffered(
        1, 1, fragments, fragments, 1, payloads, 'memory://x/1'
      )
    case _:
      return BASES[kind]


def test_a_run_that_has_just_begun_is_not_ended_by_a_member(stage):
  """No finish ends in a round that had closed before it began."""
  for incarnation, last_round in enumerate((-(1 << 62), 0), start=1):
    bad = stage.peer(0, incarnation).join()
    bad.say(messages.HandedIn(last_round))
    assert 'last_round' in bad.end()
  stage.assert_lives()


@pytest.mark.parametrize(
  'kind',
  [x for x in messages.FROM_LEARNER if x not in messages.OPENING],
  ids=lambda kind: kind.__name__,
)
def test_no_message_of_a_member_ends_the_syncer(stage, kind):
  """Each field of each kind is made large, by a learner that counts."""
  if kind is messages.HandedIn:
    stage.close_a_round()
  largest = malice.largest(kind, _base(stage, kind), wire.INCOMING_BYTES_MAX)
  for incarnation, (label, message) in enumerate(largest, start=1):
    bad = stage.peer(0, incarnation).join()
    bad.train(1)
    bad.say(message)
    bad.say(messages.Goodbye(label))
    bad.end()
    bad.close()
  stage.assert_lives()


@pytest.mark.parametrize('kind', messages.OPENING)
def test_no_hello_ends_the_syncer(stage, kind):
  base = stage.peer(0).hello
  fields = {x.name: getattr(base, x.name) for x in dataclasses.fields(kind)}
  base = kind(**fields)
  largest = malice.largest(kind, base, wire.INCOMING_BYTES_MAX)
  for incarnation, (_, hello) in enumerate(largest, start=10):
    bad = stage.peer(0)
    if hello.incarnation == base.incarnation:
      hello = dataclasses.replace(hello, incarnation=incarnation)
    bad.say(hello, messages.Goodbye('that was all'))
    bad.end()
    bad.close()
  stage.assert_lives()


@pytest.mark.parametrize('field', ['payloads', 'address', 'crcs', 'versions'])
def test_the_largest_donation_is_handed_on_or_refused(stage, field):
  """A donation once ended the syncer: handed on it was too large."""
  base = _base(stage, messages.StateOffered)
  largest = dict(
    malice.largest(messages.StateOffered, base, wire.INCOMING_BYTES_MAX)
  )[f'long {field}']
  donor = stage.peer(0).join()
  donor.train(1)
  newcomer = stage.peer(1)
  newcomer.say_hello()
  newcomer.hear(messages.Welcome)
  newcomer.say(messages.WantState('the test'))
  assert donor.hear(messages.Donate).incarnation == largest.incarnation
  donor.say(largest)
  if field in ('payloads', 'address'):
    assert newcomer.hear(messages.StateAt).offered == largest
  else:
    assert 'impossible donation' in donor.end()
    assert newcomer.hear(messages.NoState)
  stage.assert_lives()


def test_what_is_larger_is_refused_by_name(stage):
  """The sender's own end refuses it, and so does the syncer's."""
  donation = _base(stage, messages.StateOffered)
  room = wire.INCOMING_BYTES_MAX - len(wire.encode(donation))
  larger = dataclasses.replace(donation, address='x' * (room + 20))
  with pytest.raises(ValueError, match='StateOffered has'):
    wire.encode(larger)
  name, fields = 'StateOffered', dataclasses.asdict(larger)
  body = msgpack.packb([name, fields])
  assert wire.INCOMING_BYTES_MAX < len(body) < wire.MESSAGE_BYTES_MAX
  with pytest.raises(wire.MalformedMessage, match='at most') as refused:
    wire.decode(body, messages.FROM_LEARNER)
  assert refused.value.flaw == 'oversized'
