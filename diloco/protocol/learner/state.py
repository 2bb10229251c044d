# SPDX-License-Identifier: Apache-2.0
"""The state of a learner's machine as one value, and its holder."""

import dataclasses
from collections.abc import Mapping, Sequence

from diloco.protocol import messages
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.learner import events as learner_events
from diloco.protocol.values import Ema, Value, replace_unchecked

HALF_STEP = 0.5  # Rounds a fractional view of t to the nearest step.
RATE_WEIGHT = 0.2  # Weight of the newest update in the averages of `View`.
# Steps of t per own step; bounded, as a learner may have stood still.
RATE_MAX = 64.0
OWN_OFFERS_MAX = 8  # Per fragment, including those of an earlier session.


class View(Value):
  """The global step t as one learner sees it, at any of its own steps.

  An update says what t was when its round closed, and the last own step that
  the syncer knew of by then: these two belong together. From there t is
  extrapolated at its recent pace in own steps, so that a slow learner's view
  does not fall behind between two updates and a fast one's does not run ahead.
  An update also says how long after its due step a round closes.
  """

  step: int = 0  # t ...
  own_step: int = 0  # Own steps that the syncer knew of at that t.
  t_steps: float = 0.0  # Averages between two updates: of t,
  own_steps: float = 0.0  # and of own steps.
  late_steps: float = 0.0  # Average of t − r·s at the closes of rounds.

  def at(self, own_step: int) -> float:
    """Returns the estimate of t when the learner has made `own_step` steps."""
    return self.step + self.rate * (own_step - self.own_step)

  @property
  def rate(self) -> float:
    """Steps of t per own step."""
    if self.t_steps == 0.0:
      return 1.0
    return min(self.t_steps / max(self.own_steps, 1e-9), RATE_MAX)

  def closed(self, late_steps: int) -> 'View':
    """Returns the view after a round closed `late_steps` after it was due."""
    more = RATE_WEIGHT * (max(late_steps, 0) - self.late_steps)
    return replace_unchecked(self, late_steps=self.late_steps + more)

  def moved(self, step: int, own_step: int) -> 'View':
    """Returns the view after an update: t was `step` at `own_step`."""
    t_steps, own_steps = step - self.step, own_step - self.own_step
    at = replace_unchecked(self, step=step, own_step=own_step)
    if t_steps <= 0 or own_steps < 0:
      return at
    if self.t_steps == 0.0:  # The first sample.
      if own_steps == 0:
        return at
      return replace_unchecked(at, t_steps=t_steps, own_steps=own_steps)
    return replace_unchecked(
      at,
      t_steps=self.t_steps + RATE_WEIGHT * (t_steps - self.t_steps),
      own_steps=self.own_steps + RATE_WEIGHT * (own_steps - self.own_steps),
    )


class OwnOffer(Value):
  """An offer that a round may merge, or has merged."""

  handle: int
  incarnation: int  # Incarnation of its session.
  base: int  # Version that the offer is relative to.
  step: int  # Of the learner, when the fragment was copied.
  tokens: int  # All of the learner's own tokens until then.
  c_tokens: int  # Of these, the tokens that the offer brings.


class LastOffer(Value):
  """The last offer of a fragment, made as the learner ceased."""

  fragment: int
  handle: int
  step: int  # Own step up to which it reaches.
  pulled: bool = False
  outcome: str = ''  # For humans, once it is known.


class LinkLoad(Value):
  """How much of its time a learner's link down would need for all updates."""

  announced_s: float | None = None  # Time of the last announcement.
  every_s: Ema = dataclasses.field(default=Ema())  # Between two announcements.
  fetch_s: Ema = dataclasses.field(default=Ema())  # To fetch one update.
  began_s: float = 0.0  # When the fetch under way began.

  def announced(self, now_s: float) -> 'LinkLoad':
    """Notes an update that the syncer has announced."""
    if self.announced_s is None:
      return replace_unchecked(self, announced_s=now_s)
    every_s = self.every_s.add(now_s - self.announced_s)
    return replace_unchecked(self, announced_s=now_s, every_s=every_s)

  def fetched(self, now_s: float, updates: int) -> 'LinkLoad':
    """Notes that so many updates were fetched at one go."""
    fetch_s = self.fetch_s.add((now_s - self.began_s) / updates)
    return replace_unchecked(self, fetch_s=fetch_s)

  @property
  def ratio(self) -> float:
    """Time to fetch an update, by the time between two; 0: not known yet.

    Above 1 the link is too slow by that factor.
    """
    if self.fetch_s.value_s is None or not self.every_s.or_zero():
      return 0.0
    return self.fetch_s.value_s / self.every_s.value_s


class Fragment(Value):
  """A learner's view of one fragment; versions count its closes."""

  base: int = 0  # Version that θ_p was last set to; offers are relative to it.
  host: int = 0  # The newest version on the host, verified by its CRC.
  # Version that the host will hold after the fetches in progress.
  coming: int = 0
  announced: int = 0  # The newest version known to exist.
  # Version and CRC at the syncer, as it said last outside of updates.
  at_syncer: tuple[int, int] | None = None
  unlike: bool = False  # The host's bytes differ from the syncer's.
  crc: int = 0  # CRC of the host's copy.
  applied: bool = True  # Whether θ_p was set to the host's copy.
  from_step: int = 0  # Own steps and tokens up to which θ_p has no progress.
  from_tokens: int = 0
  offered_round: int = 0  # The newest round that it was offered for.
  first_step: int = 0  # Own step of the first offer for that round.
  # Those that may be merged, by ascending handle.
  offers: tuple[OwnOffer, ...] = ()
  merged: OwnOffer | None = None  # By an update that θ has not taken in.
  merged_other: bool = False  # An offer unknown to this process was merged.
  # One of `offers` is pulled: a newer one would be useless.
  pulled: bool = False
  # The version that includes `merged`, or that of `merged_other`: θ takes in
  # nothing older any more, since that would take the own progress away.
  merged_version: int = 0
  # Announced and not being fetched yet, by ascending version: the full
  # fragment if one was sent, then updates. At most `UPDATES_KEPT` of these.
  full: messages.FullFragment | None = None
  updates: tuple[messages.Update, ...] = ()
  wanted: bool = False  # The full fragment was asked for, or will be.
  # It is `wanted` because too many updates have come since: what the host has
  # is still good.
  lags: bool = False
  needed: int = 0  # The version that a bootstrap must reach at least.
  postponed: bool = False  # It comes once its shard is back.
  ask_at_s: float | None = None  # When to ask; None: already asked.
  asked_at_s: float = float('-inf')
  received: int = 0  # Full fragments that this session has announced.

  @property
  def complete(self) -> bool:
    """True if the host holds everything that was announced to it."""
    return not (self.wanted or self.unlike) and self.host == self.coming

  @property
  def current(self) -> bool:
    """True if θ_p was set to the newest announced version."""
    return self.complete and self.base == self.host

  @property
  def usable(self) -> bool:
    """True if the host's copy is the syncer's at some version that will do.

    Over a link that is too slow a newer one is on its way at all times.
    """
    replaced = self.wanted or self.full is not None
    return (
      not self.unlike
      and self.host >= self.needed
      and (self.lags or not replaced)
    )

  def told_otherwise(self, version: int, crc: int) -> bool:
    """Returns True if the syncer has other bytes of that version."""
    at = self.at_syncer
    return at is not None and at[0] == version and at[1] != crc

  def can_be_offered(self, step: int, staleness_max: int) -> bool:
    """Returns True if θ_p has progress at own step `step` that can be offered.

    No part of that progress may be merged already. Updates that are on their
    way have said what they merged; a full fragment may include more.

    Args:
      step: own step.
      staleness_max: how many versions behind an offer may be.
    """
    return (
      step > self.from_step
      and self.applied
      and not (self.wanted or self.unlike or self.full is not None)
      and self.host >= self.merged_version
      and self.coming - self.base <= staleness_max
    )

  @property
  def offered_step(self) -> int | None:
    """Own step of the newest offer that may be merged."""
    return self.offers[-1].step if self.offers else None

  def offers_in(self, incarnation: int) -> tuple[OwnOffer, ...]:
    """Returns the offers of one session."""
    return tuple(x for x in self.offers if x.incarnation == incarnation)

  def unanswered(self, incarnation: int) -> int:
    """Counts the session's offers that the syncer has not answered yet."""
    return sum(
      offer.incarnation == incarnation and offer.base == self.base
      for offer in self.offers
    )

  def own_offer(self, incarnation: int, handle: int) -> OwnOffer | None:
    """Returns the offer with this handle, if it is known."""
    named = (incarnation, handle)
    return next(
      (x for x in self.offers if (x.incarnation, x.handle) == named), None
    )

  def without(self, handles: Sequence[int]) -> tuple[OwnOffer, ...]:
    """Returns the offers except those with `handles`."""
    return tuple(x for x in self.offers if x.handle not in handles)


class LearnerState(Value):
  """All that the machine knows, as a value to compare, save and restore."""

  fragments: tuple[Fragment, ...]
  now: float = float('-inf')
  incarnation: int = 0  # Incarnation of the last session.
  in_session: bool = False  # A stream to the syncer is open.
  connected: bool = False  # True once the syncer has sent its welcome.
  source: str = 'the seed'  # Origin of the inner state, for humans.
  settled: bool = False  # The origin of the inner state is decided.
  seeking: bool = False  # A peer is being asked for it.
  drawing: bool = False  # The initial Θ is being drawn.
  fetching: messages.StateAt | None = None  # What a peer has offered.
  clean: bool = False  # The inner state must not be the process's own.
  began: bool = False  # Bootstrap is complete; it trains.
  world: messages.World = dataclasses.field(default=messages.World())
  parked: bool = False  # τ = 0: the loop waits at its boundary.
  ceased: bool = False  # No more inner steps.
  left: bool = False
  step: int = 0  # Own inner steps, dispatched, and their tokens.
  tokens: int = 0
  completed_step: int = 0
  made_s: float = 0.0  # As in `messages.Report`.
  reported_step: int = 0  # The last that any syncer was told of.
  reported: bool = False  # Whether this session has reported one.
  step_s: Ema = dataclasses.field(default=Ema())
  rows: int = 0  # Taken of the data shard at the start.
  closed_known: int = 0
  last_offered: int = 0
  handles: int = 0  # Given to offers so far.
  offer_ahead_steps: int = 0  # In steps of t.
  again_rounds: tuple[int, ...] = ()  # To be offered again, ascending.
  view: View = dataclasses.field(default=View())  # Of t.
  asking: tuple[int, ...] = ()  # Fragments with an `ask_at_s`, ascending.
  donations: tuple[messages.Donate, ...] = ()  # That are asked for.
  giving: tuple[int, int] | None = None  # The newcomer being served.
  # Offers of this session, made as it ceased.
  last_offers: tuple[LastOffer, ...] = ()
  leave_at_s: float | None = None  # Set by `Stop`.
  # All steps are made, but the syncer is away.
  give_up_at_s: float | None = None
  last_round: int | None = None  # Set by `Finish`.
  done: bool = False
  said_at_s: float = float('-inf')  # Its last message to the syncer.
  # The fetch that is under way: fragment, the version that it leads to, number
  # of updates (0: the full fragment). It may have begun in an earlier session.
  under_way: tuple[int, int, int] | None = None
  queued: tuple[int, ...] = ()  # Fragments with `full` or `updates`.
  # Announced and not here yet: fragment, version, handle, time of the
  # announcement.
  coming_since: tuple[tuple[int, int, int, float], ...] = ()
  link: LinkLoad = dataclasses.field(default=LinkLoad())
  # Fetches to name in the next report, each with its time of arrival.
  fetched: tuple[tuple[messages.Fetched, float], ...] = ()

  @property
  def goes_on(self) -> bool:
    """True if it counts at once: its slices were part of the run just now."""
    return self.world.reformed and not self.clean

  @property
  def global_step(self) -> int:
    """The global step t at the learner's current own step."""
    return int(self.view.at(self.step) + HALF_STEP)


class Core:
  """The state and pending effects, shared by the machine's modules."""

  def __init__(
    self,
    config: ProtocolConfig,
    run: str,
    learner: int,
    fingerprints: Mapping[str, str],
    state: LearnerState,
    bootstrap: str,
  ):
    self.config = config
    self.bootstrap = bootstrap
    self.run = run
    self.learner = learner
    self.fingerprints = dict(fingerprints)
    self.state = state
    self.effects: list[learner_events.Effect] = []

  def set(self, **fields):
    self.state = replace_unchecked(self.state, **fields)

  def set_fragment(self, p: int, **fields):
    fragments = list(self.state.fragments)
    fragments[p] = replace_unchecked(fragments[p], **fields)
    self.set(fragments=tuple(fragments))
    if 'full' in fields or 'updates' in fields:
      waiting = (q for q, f in enumerate(fragments) if f.full or f.updates)
      self.set(queued=tuple(waiting))
    if 'ask_at_s' in fields:
      due = (q for q, f in enumerate(fragments) if f.ask_at_s is not None)
      self.set(asking=tuple(due))

  def send(self, message):
    self.set(said_at_s=self.state.now)
    self.effects.append(learner_events.Send(message))

  def leave(self, reason: str, **why: bool):
    """Leaves the run; happens at most once, and is final for this process.

    Args:
      why: which of the flags of `Leave` are set, besides `done`.
    """
    if not self.state.left:
      self.set(left=True, ceased=True, parked=False)
      leave = learner_events.Leave(reason, done=self.state.done, **why)
      self.effects.append(leave)
