# SPDX-License-Identifier: Apache-2.0
"""What must hold after every event at the syncer, whatever happened (§3)."""

from diloco.protocol import messages, syncer_io
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.state import Snapshot


class Violation(AssertionError):
  """An invariant of the design does not hold."""


class Invariants:
  """Watches one syncer from outside: events, effects, snapshots.

  Numbers in the messages are those of the list in `design` §3.
  """

  def __init__(self, config: ProtocolConfig):
    self._config = config
    self._versions = [0] * config.fragments
    self._closed_round = 0
    self._step = 0
    self._incarnations: dict[int, int] = {}  # Of open sessions.
    self._merged: set[tuple[int, int, int]] = set()
    self._held: dict[tuple[int, int], set[int]] = {}  # Handles, by session.

  def check(
    self,
    event: syncer_io.Event,
    effects: list[syncer_io.Effect],
    snapshot: Snapshot,
  ):
    """Raises `Violation` for the first invariant that does not hold."""
    self._note_offer(event)
    for effect in effects:
      match effect:
        case syncer_io.Greet():
          self._incarnations[effect.learner] = effect.incarnation
        case syncer_io.Drop():
          if self._incarnations.get(effect.learner) == effect.incarnation:
            del self._incarnations[effect.learner]
          self._held.pop((effect.learner, effect.incarnation), None)
        case syncer_io.Send(message=messages.Retired(handles=handles)):
          session = effect.learner, effect.incarnation
          self._held.get(session, set()).difference_update(handles)
        case syncer_io.Merge():
          self._check_merge(effect)
        case syncer_io.Publish():
          self._check_publish(effect)
    self._check_snapshot(snapshot)

  def _note_offer(self, event: syncer_io.Event):
    match event:
      case syncer_io.Heard(message=messages.Offer() as offer):
        session = event.learner, event.incarnation
        if self._incarnations.get(event.learner) == event.incarnation:
          self._held.setdefault(session, set()).add(offer.payload.handle)

  def _check_merge(self, merge: syncer_io.Merge):
    learners = [share.learner for share in merge.shares]
    _hold(learners == sorted(set(learners)), 'sums run in id order', merge)
    total = sum(share.weight for share in merge.shares)
    _hold(abs(total - 1.0) < 1e-9, 'weights sum to 1', merge)
    for share in merge.shares:
      alive = self._incarnations.get(share.learner) == share.incarnation
      _hold(alive, '2: merged after its incarnation ended', share)
      _hold(share.c_steps >= 1, '2: merged without a step', share)
      contribution = share.learner, merge.fragment, share.base_version
      _hold(contribution not in self._merged, '2: merged twice', share)
      self._merged.add(contribution)
      staleness = self._versions[merge.fragment] - share.base_version
      limit = self._config.max_staleness_versions
      _hold(staleness <= limit, 'staleness limit', share)

  def _check_publish(self, publish: syncer_io.Publish):
    p = publish.fragment
    expected = self._versions[p] + 1
    _hold(publish.version == expected, '1: one more per close', publish)
    self._versions[p] = publish.version
    told = dict(publish.recipients)
    _hold(told == self._incarnations, 'every session is told', publish)

  def _check_snapshot(self, snapshot: Snapshot):
    config = self._config
    _hold(snapshot.step >= self._step, 't fell', snapshot)
    self._step = snapshot.step
    closed = snapshot.closed_round
    _hold(closed >= self._closed_round, 'rounds reopened', snapshot)
    self._closed_round = closed
    opened = closed + len(snapshot.open_rounds)
    if snapshot.last_round is None:
      due = snapshot.step // config.spacing_steps
      _hold(opened <= due, '3: more rounds than the pace allows', snapshot)
      room = config.inflight_max
    else:
      _hold(opened <= snapshot.last_round, 'rounds after the end', snapshot)
      room = config.fragments
    _hold(len(snapshot.open_rounds) <= room, '8: open rounds', snapshot)
    _hold(tuple(self._versions) == snapshot.versions, '1: versions', snapshot)
    for (learner, _), handles in self._held.items():
      # One waiting per fragment, and one under way per open round.
      most = config.fragments + room
      _hold(len(handles) <= most, f'8: offers of learner {learner}', handles)


def _hold(fact: bool, invariant: str, evidence):
  if not fact:
    raise Violation(f'{invariant}: {evidence}')
