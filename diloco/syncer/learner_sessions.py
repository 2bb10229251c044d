# SPDX-License-Identifier: Apache-2.0
"""The syncer's sessions with learners, and the messages sent in each."""

import collections
from collections.abc import Callable

from diloco.protocol import messages
from diloco.transport.control_server import ControlSession

Key = tuple[int, int]  # (learner, incarnation)


class LearnerSession:
  """One session of one learner, with its messages in order.

  A message about bytes that a shard has yet to offer keeps its place in the
  order; later messages wait for it.

  Args:
    offers_max: how many can be on offer at once.
  """

  def __init__(self, session: ControlSession, offers_max: int):
    self.session = session
    self._offers_max = offers_max
    self._waiting: collections.deque[MessageReservation] = collections.deque()
    # Bytes on offer, by handle in the order of the offers.
    self._nbytes: dict[int, int] = {}

  def send(self, message):
    """Sends a message after all that were sent, or reserved a place, before."""
    self.reserve().send(message)

  def reserve(self) -> 'MessageReservation':
    """Reserves the place of a message that will follow."""
    place = MessageReservation(self._flush)
    self._waiting.append(place)
    return place

  def note_offer(self, payload: messages.Payload):
    """Notes an offer that can be fetched now."""
    self._nbytes[payload.handle] = payload.nbytes
    if len(self._nbytes) > self._offers_max:
      del self._nbytes[next(iter(self._nbytes))]

  def retire(self, handle: int) -> int:
    """Drops a fetched offer; returns its bytes, or 0 if unknown."""
    return self._nbytes.pop(handle, 0)

  def _flush(self):
    while self._waiting and self._waiting[0].filled:
      message = self._waiting.popleft().message
      if message is not None:
        self.session.send(message)


class MessageReservation:
  """The reserved place of a message in one session."""

  def __init__(self, flush: Callable[[], None]):
    self._flush = flush
    self.filled = False
    self.message = None

  def send(self, message):
    """Sends `message` in this place; None: nothing."""
    self.filled, self.message = True, message
    self._flush()


class LearnerSessions:
  """The sessions by learner and incarnation.

  A session that has said hello is *pending* until the machine admits it.
  """

  def __init__(self, ids: int):
    self._ids = ids
    self._peers: dict[Key, LearnerSession] = {}
    self._pending: dict[Key, tuple[ControlSession, messages.Hello]] = {}

  def __len__(self) -> int:
    return len(self._peers)

  def __iter__(self):
    return iter(sorted(self._peers))

  def get(self, key: Key) -> LearnerSession | None:
    return self._peers.get(key)

  def add(self, key: Key, peer: LearnerSession):
    self._peers[key] = peer

  def admit(
    self, session: ControlSession, hello: messages.Hello | messages.Inquiry
  ) -> str | None:
    """Lets a first message through to the machine, or returns why not."""
    key = hello.learner, hello.incarnation
    if not 0 <= hello.learner < self._ids:
      return f'learner={hello.learner}: must be in 0 … {self._ids - 1}'
    if self.session(key) is not None:
      return f'learner {hello.learner} speaks in another session already'
    self._pending[key] = session, hello
    return None

  def session(self, key: Key) -> ControlSession | None:
    """Returns the session whose messages count for `key`."""
    if key in self._peers:
      return self._peers[key].session
    pending = self._pending.get(key)
    return pending and pending[0]

  def take_pending(
    self, key: Key
  ) -> tuple[ControlSession, messages.Hello] | None:
    return self._pending.pop(key, None)

  def take(self, key: Key) -> LearnerSession | None:
    return self._peers.pop(key, None)


def may_speak(peers: LearnerSessions, session: ControlSession, event) -> bool:
  """Returns True if a session's event counts: one session per incarnation."""
  key = event.learner, event.incarnation
  if not isinstance(getattr(event, 'message', None), messages.OPENING):
    return peers.session(key) in (None, session)
  reason = peers.admit(session, event.message)
  if reason is not None:
    session.send(messages.Refusal(reason, final=True))
    session.close(reason)
  return reason is None
