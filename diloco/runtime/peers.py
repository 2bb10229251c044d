# SPDX-License-Identifier: Apache-2.0
"""The syncer's side of its sessions: who they are, what is offered to whom."""

import itertools

import numpy as np

from diloco.protocol import messages
from diloco.transport.control_session import Session
from diloco.transport.interface import Inlet, Outlet

Key = tuple[int, int]  # (learner, incarnation)


class Peer:
  """One session of one learner.

  Keeps one outer update and one full fragment per fragment on offer: whoever
  is further behind than that needs the newest full one anyway.
  """

  def __init__(
    self,
    session: Session,
    outlet: Outlet,
    inlet: Inlet,
    handles: 'itertools.count[int]',
  ):
    self.session = session
    self.inlet = inlet
    self.address = outlet.address
    self._outlet = outlet
    self._handles = handles
    self._offered: dict[
      tuple[str, int], int
    ] = {}  # (codec, fragment) → handle.
    self._nbytes: dict[int, int] = {}

  def offer(self, codec: str, fragment: int, data: np.ndarray) -> int:
    """Offers `data` in place of the last of its kind; returns the handle."""
    handle = next(self._handles)
    before = self._offered.get((codec, fragment))
    self._outlet.offer(handle, data)
    self._offered[codec, fragment] = handle
    self._nbytes[handle] = data.nbytes
    if before is not None:
      self.retire(before)
    return handle

  def retire(self, handle: int) -> int:
    """Withdraws an offer; how many bytes it was, 0 where it is gone."""
    nbytes = self._nbytes.pop(handle, 0)
    self._outlet.retire(handle)
    return nbytes

  def close(self, reason: str):
    """Ends the stream, the pulls and the offers."""
    self.session.close(reason)
    self.inlet.close()
    self._outlet.close()


class Peers:
  """The sessions by learner and incarnation.

  A session that said hello is a *stranger* until the machine greets it.
  """

  def __init__(self, ids: int):
    self._ids = ids
    self._peers: dict[Key, Peer] = {}
    self._strangers: dict[Key, tuple[Session, messages.Hello]] = {}

  def __len__(self) -> int:
    return len(self._peers)

  def __iter__(self):
    return iter(sorted(self._peers))

  def get(self, key: Key) -> Peer | None:
    return self._peers.get(key)

  def add(self, key: Key, peer: Peer):
    self._peers[key] = peer

  def knock(self, session: Session, hello: messages.Hello) -> str | None:
    """Lets a hello in to be judged by the machine; or says why not."""
    key = hello.learner, hello.incarnation
    if not 0 <= hello.learner < self._ids:
      return f'learner={hello.learner}: must be in 0 … {self._ids - 1}'
    if self.session(key) is not None:
      return f'learner {hello.learner} speaks in another session already'
    self._strangers[key] = session, hello
    return None

  def session(self, key: Key) -> Session | None:
    """Whose messages count for `key`."""
    if key in self._peers:
      return self._peers[key].session
    stranger = self._strangers.get(key)
    return stranger and stranger[0]

  def take_stranger(self, key: Key) -> tuple[Session, messages.Hello] | None:
    return self._strangers.pop(key, None)

  def take(self, key: Key) -> Peer | None:
    return self._peers.pop(key, None)
