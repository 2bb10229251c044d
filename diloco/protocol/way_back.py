# SPDX-License-Identifier: Apache-2.0
"""How long an update takes from its merge to a learner's host.

It is the part of ξ_sync (Eq. 3) that the syncer doesn't see: what a learner
says of a fetch, in the report that names it, is set against when the update
was published. Clocks are never compared, only spans of one clock.
"""

import math
from collections.abc import Iterable

from diloco.protocol import messages, syncer_io
from diloco.protocol.state import State


def is_possible(fetched: messages.Fetched) -> bool:
  """Whether the times are times."""
  return all(
    math.isfinite(x) and x >= 0.0 for x in (fetched.fetch_s, fetched.held_s)
  )


def on_published(state: State, fragment: int):
  """A new version is told to everyone.

  Of each fragment the oldest update of which a session has said nothing is
  kept: over a slow link a newer one would else always take its place.
  """
  version = state.versions[fragment]
  for learner, member in list(state.members.items()):
    if fragment not in member.published:
      published = {**member.published, fragment: (version, state.now)}
      state.change(learner, published=published)


def on_fetched(
  state: State, learner: int, fetched: tuple[messages.Fetched, ...]
):
  """A report names what its learner holds now."""
  if not fetched:
    return
  for each in fetched:
    version, at_s = state.members[learner].published.get(each.fragment, (0, 0))
    if not 0 < version <= each.version:
      continue
    state.forget_published(learner, each.fragment)
    if version == each.version:
      _add(state, learner, each, state.now - at_s)
  incarnation = state.members[learner].incarnation
  handles = tuple(each.handle for each in fetched)
  state.emit(syncer_io.Retire(learner, incarnation, handles))


def _add(state: State, learner: int, fetched: messages.Fetched, since_s: float):
  """Both ways of a message are taken to be equally long.

  Args:
    state: of the syncer.
    learner: whose report it is.
    fetched: what it says of the update.
    since_s: from its publication to the report.
  """
  messages_s = max(0.0, since_s - fetched.fetch_s - fetched.held_s)
  way_back_s = min(since_s, messages_s / 2 + fetched.fetch_s)
  average = state.members[learner].way_back_s.add(way_back_s)
  state.change(learner, way_back_s=average)


def kth_s(averages: Iterable[float | None], k: int) -> float:
  """The K-th smallest of what is known, 0 where nothing is."""
  known = sorted(x for x in averages if x is not None)
  return known[min(k, len(known)) - 1] if known else 0.0
