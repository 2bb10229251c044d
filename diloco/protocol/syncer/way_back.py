# SPDX-License-Identifier: Apache-2.0
"""Measures how long an update takes from its merge to a learner's host.

It is the part of ξ_sync (Eq. 3) that the syncer does not see: the fetch times
in a learner's report are subtracted from the time since the update was
published. Clocks are never compared, only durations on one clock.
"""

import math

from diloco.protocol import messages
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer.state import SyncerState


def is_possible(fetched: messages.Fetched) -> bool:
  """Returns True if the reported times are finite and not negative."""
  return all(
    math.isfinite(x) and x >= 0.0 for x in (fetched.fetch_s, fetched.held_s)
  )


def on_published(state: SyncerState, fragment: int):
  """Notes when a fragment's new version was announced to the sessions.

  For each fragment, the oldest update that a session has not reported is kept:
  over a slow link a newer one would otherwise always replace it.
  """
  version = state.versions[fragment]
  for learner, member in list(state.members.items()):
    if fragment not in member.published:
      published = {**member.published, fragment: (version, state.now)}
      state.change(learner, published=published)


def on_fetched(
  state: SyncerState, learner: int, fetched: tuple[messages.Fetched, ...]
):
  """Measures the way back for the fetches that a report names."""
  if not fetched:
    return
  for each in fetched:
    version, at_s = state.members[learner].published.get(each.fragment, (0, 0))
    if not 0 < version <= each.version:
      continue
    forget_published(state, learner, each.fragment)
    if version == each.version:
      _add(state, learner, each, state.now - at_s)
  incarnation = state.members[learner].incarnation
  handles = tuple(each.handle for each in fetched)
  state.emit(syncer_events.Retire(learner, incarnation, handles))


def _add(
  state: SyncerState, learner: int, fetched: messages.Fetched, since_s: float
):
  """Adds a sample, taking both directions of a message as equally long.

  Args:
    since_s: seconds from the update's publication to the report.
  """
  messages_s = max(0.0, since_s - fetched.fetch_s - fetched.held_s)
  way_back_s = min(since_s, messages_s / 2 + fetched.fetch_s)
  average = state.members[learner].way_back_s.add(way_back_s)
  state.change(learner, way_back_s=average)


def forget_published(state: SyncerState, learner: int, fragment: int):
  """Stops measuring how long an update takes to reach a learner."""
  published = dict(state.members[learner].published)
  if published.pop(fragment, None) is not None:
    state.change(learner, published=published)
