# SPDX-License-Identifier: Apache-2.0
"""What a learner's machine knows, as one value, and who holds it."""

import dataclasses
from collections.abc import Mapping, Sequence

from diloco.protocol import learner_io, messages
from diloco.protocol.config import ProtocolConfig
from diloco.protocol.grace import Ema
from diloco.protocol.offering import HALF_STEP, View
from diloco.protocol.values import changed

MADE_MAX = 8  # Per fragment; with those of a session before.


@dataclasses.dataclass(frozen=True)
class Made:
  """An offer that a round may merge, or has merged."""

  handle: int
  incarnation: int  # Of its session.
  base: int  # Version that it is relative to.
  step: int  # Of the learner, when the fragment was copied.
  tokens: int  # All of the learner's own, until then.
  c_tokens: int  # Of these, the tokens that it brings.


@dataclasses.dataclass(frozen=True)
class LastOffer:
  """The offer of a fragment that a learner has made as it ceased."""

  fragment: int
  handle: int
  step: int  # Own step up to which it reaches.
  pulled: bool = False
  outcome: str = ''  # For people, once it is known.


@dataclasses.dataclass(frozen=True)
class Fragment:
  """How the learner stands to one fragment. Versions count its closes."""

  base: int = 0  # What θ_p was last set to; offers are relative to it.
  host: int = 0  # The newest that the host holds, proven by its CRC.
  coming: int = 0  # What the host holds once the fetches under way are done.
  announced: int = 0  # The newest that is known to exist.
  unlike: bool = False  # The host's copy is not what the syncer has.
  crc: int = 0  # Of the host's copy.
  applied: bool = True  # Whether θ_p was set to the host's copy.
  from_step: int = 0  # Own steps and tokens that θ_p has no progress of.
  from_tokens: int = 0
  offered_round: int = 0  # The newest round that it was offered for.
  first_step: int = 0  # When it was offered for that the first time.
  offers: tuple[Made, ...] = ()  # That may be merged, by ascending handle.
  merged: Made | None = None  # Was, by an update that θ has not taken in.
  merged_other: bool = False  # So was one that this process knows nothing of.
  pulled: bool = False  # One of `offers` is: a newer one would be in vain.
  wanted: bool = False  # The full fragment is asked for, or will be.
  postponed: bool = False  # It comes once the shard that has it is back.
  ask_at_s: float | None = None  # When it will be; None: it is.
  asked_at_s: float = float('-inf')

  @property
  def complete(self) -> bool:
    """Whether the host holds all that it has been told of."""
    return not (self.wanted or self.unlike) and self.host == self.coming

  @property
  def current(self) -> bool:
    """Whether θ_p was set to that."""
    return self.complete and self.base == self.host

  def can_be_offered(self, step: int) -> bool:
    """Whether own step `step` has progress on it, none of it merged already.

    What was merged of an older base may be on its way back.
    """
    return step > self.from_step and self.current

  @property
  def offered_step(self) -> int | None:
    """Of the newest offer that may be merged."""
    return self.offers[-1].step if self.offers else None

  def offers_in(self, incarnation: int) -> tuple[Made, ...]:
    """Those of one session."""
    return tuple(x for x in self.offers if x.incarnation == incarnation)

  def unanswered(self, incarnation: int) -> int:
    """Offers of this base in a session of which nothing is known yet."""
    return sum(
      made.incarnation == incarnation and made.base == self.base
      for made in self.offers
    )

  def found(self, incarnation: int, handle: int) -> Made | None:
    """The offer of that name."""
    named = (incarnation, handle)
    return next(
      (x for x in self.offers if (x.incarnation, x.handle) == named), None
    )

  def without(self, handles: Sequence[int]) -> tuple[Made, ...]:
    """Its offers but for these."""
    return tuple(x for x in self.offers if x.handle not in handles)


@dataclasses.dataclass(frozen=True)
class Donation:
  """A newcomer that waits for this learner's state."""

  learner: int
  incarnation: int
  versions: tuple[int, ...]  # That θ must have taken in before.


@dataclasses.dataclass(frozen=True)
class State:
  """All that the machine knows: compared, saved, restored."""

  fragments: tuple[Fragment, ...]
  now: float = float('-inf')
  incarnation: int = 0  # Of the last session.
  in_session: bool = False  # A stream to the syncer is open.
  connected: bool = False  # Welcomed, that is.
  source: str = 'the seed'  # Where the inner state is from, for people.
  settled: bool = False  # It is known where it is to be from.
  seeking: bool = False  # A peer is asked for it.
  clean: bool = False  # It must not be what the process has brought.
  began: bool = False  # Bootstrap is complete; it trains.
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
  position: int = 0  # Of the data, at the start.
  closed_known: int = 0
  last_offered: int = 0
  handles: int = 0  # Given to offers so far.
  lead: int = 0  # In steps.
  again_rounds: tuple[int, ...] = ()  # To be offered again, ascending.
  view: View = dataclasses.field(default=View())  # Of t.
  asking: tuple[int, ...] = ()  # Fragments with an `ask_at_s`, ascending.
  donations: tuple[Donation, ...] = ()  # That are asked for.
  giving: tuple[int, int] | None = None  # The newcomer whose copy is out.
  last_offers: tuple[LastOffer, ...] = ()  # Of this session, once it ceased.
  leave_at_s: float | None = None  # Set by `Stop`.
  give_up_at_s: float | None = None  # It has made all steps, and is cut off.
  last_round: int | None = None  # Set by `Finish`.
  done: bool = False
  said_at_s: float = float('-inf')  # Its last message to the syncer.
  # Announced and not here yet: fragment, version, and since when.
  coming_since: tuple[tuple[int, int, float], ...] = ()
  # To name in the next report, and since when each is here.
  fetched: tuple[tuple[messages.Fetched, float], ...] = ()

  @property
  def global_step(self) -> int:
    """t as it sees it now."""
    return int(self.view.at(self.step) + HALF_STEP)


class Core:
  """What the parts of the machine share: the state, and what they want."""

  def __init__(
    self,
    config: ProtocolConfig,
    run: str,
    learner: int,
    fingerprints: Mapping[str, str],
    state: State,
  ):
    self.config = config
    self.run = run
    self.learner = learner
    self.fingerprints = dict(fingerprints)
    self.state = state
    self.effects: list[learner_io.Effect] = []

  def set(self, **fields):
    self.state = changed(self.state, **fields)

  def set_fragment(self, p: int, **fields):
    fragments = list(self.state.fragments)
    fragments[p] = changed(fragments[p], **fields)
    self.set(fragments=tuple(fragments))
    if 'ask_at_s' in fields:
      due = (q for q, f in enumerate(fragments) if f.ask_at_s is not None)
      self.set(asking=tuple(due))

  def send(self, message):
    self.set(said_at_s=self.state.now)
    self.effects.append(learner_io.Send(message))

  def leave(
    self,
    reason: str,
    refused: bool = False,
    stopped: bool = False,
    cut_off: bool = False,
  ):
    """Once, and for this process for good."""
    if not self.state.left:
      self.set(left=True, ceased=True, parked=False)
      self.effects.append(
        learner_io.Leave(
          reason,
          done=self.state.done,
          stopped=stopped,
          refused=refused,
          cut_off=cut_off,
        )
      )
