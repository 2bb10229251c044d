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
    hello: its first message.
    offers_max: how many can be on offer at once.

  Attributes:
    admitted: False until the machine has admitted it.
  """

  def __init__(
    self,
    session: ControlSession,
    hello: messages.Hello | messages.Inquiry,
    offers_max: int,
  ):
    self.session = session
    self.hello = hello
    self.admitted = False
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
