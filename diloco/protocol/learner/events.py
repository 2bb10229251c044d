# SPDX-License-Identifier: Apache-2.0
"""Events and effects of a learner's machine.

Effects marked *boundary* are for the training loop, which performs them between
two inner steps, in the given order. All others are for the threads around it.
"""

from diloco.protocol import messages
from diloco.protocol.values import Value

# Events ----------------------------------------------------------------------


class Event(Value):
  """An input of a learner's machine."""


class Connected(Event):
  """A stream to the syncer is open."""

  incarnation: int
  # Where the syncer will pull this learner's offers, by part.
  addresses: tuple[str, ...]
  # How several hosts share the arrays; '': there is one host.
  partition: str = ''


class Disconnected(Event):
  """The stream has closed; the driver will reconnect."""

  reason: str


class Heard(Event):
  """A message of the syncer has arrived."""

  message: object  # One of messages.FROM_SYNCER.


class Boundary(Event):
  """One more inner step was dispatched, on `tokens` tokens."""

  tokens: int


class Completed(Event):
  """An inner step is done; steps complete in order."""

  tokens: int
  rows: int  # This and all before it took of the data shard.
  step_s: float
  stall_s: float
  loss: float
  saved_step: int = 0  # As in `messages.Report`.


class OfferDropped(Event):
  """A snapshot did not become an offer: no room, or a newer one exists."""

  fragment: int
  handle: int


class Rebuilt(Event):
  """The host holds `fragment` of Θ at `version`, verified by its CRC."""

  fragment: int
  version: int
  crc: int


class FetchFailed(Event):
  """A fetch failed, or its bytes did not match."""

  fragment: int
  version: int  # That it should have led to.
  reason: str


class StateFetched(Event):
  """The host holds a donor's copy of Θ, verified, and its inner state."""

  offered: messages.StateOffered
  donor: int
  stored: bool = False  # It is that of its checkpoint.


class NothingStored(Event):
  """No peer's checkpoint could be read that is newer than what is here."""

  reason: str


class StateFailed(Event):
  """A donor's state did not arrive complete."""

  state: messages.StateAt
  reason: str


class Drawn(Event):
  """θ and the host's copy of Θ are the run's initial parameters."""

  crcs: tuple[int, ...]  # By fragment.


class Stop(Event):
  """The process must stop: leave in good order, within the notice time."""

  notice_s: float


class Tick(Event):
  """Time has passed: a deadline was reached."""


# Effects ---------------------------------------------------------------------


class Effect(Value):
  """An output of a learner's machine, for its driver to perform."""


class Send(Effect):
  """Send a message to the syncer."""

  message: object  # One of messages.FROM_LEARNER.


class Snapshot(messages.OfferTerms, Effect):
  """Boundary: copy the fragment, encode it against its base, offer it."""

  handle: int  # Handle of the offer, unique in this process.
  keep: tuple[int, ...]  # Handles of this fragment's copies to keep.

  def offer(self, payload: messages.Payload) -> messages.Offer:
    """Returns the message that offers the copy; every driver's."""
    return messages.Offer(**self.facts(messages.OfferTerms), payload=payload)


class HandIn(Effect):
  """Boundary: say `HandedIn` after the preceding snapshots are offered."""

  last_round: int


class SayLeaving(Effect):
  """Boundary: say `Leaving` after the preceding snapshots are offered."""


class DonateState(messages.SessionKey, Effect):
  """Boundary: copy the inner state, offer it and Θ to a newcomer."""

  step: int
  partition: str = ''  # The newcomer's.


class EndDonation(messages.SessionKey, Effect):
  """Withdraw what was offered to a newcomer."""


class DonateFragment(Effect):
  """Offer the syncer the host's copy of a fragment, which has `version`."""

  fragment: int
  version: int


class FetchState(Effect):
  """Pull what a donor offers."""

  state: messages.StateAt


class ReadStored(Effect):
  """Read the newest checkpoint of a peer: `StateFetched` or `NothingStored`."""


class Adopt(Effect):
  """Boundary: make the fetched inner state this learner's own."""


class Draw(Effect):
  """Boundary: draw the initial Θ, with a fresh inner state; say `Drawn`."""


class Reset(Effect):
  """Boundary: make the inner state a fresh one; there is none to be trusted."""


class Apply(Effect):
  """Boundary: blend the host's `version` of the fragment into θ.

  With `carry`, progress made after the copy of `handle` stays in θ. Without it,
  what the blend rule leaves of θ does not count as progress of the learner.

  Per fragment, the learner's trained tokens are the sum of all `merged_tokens`
  and `overwritten_tokens` plus those still to be offered.
  """

  fragment: int
  version: int
  carry: bool
  handle: int = 0  # Its own offer that was merged; 0: none.
  keep: tuple[int, ...] = ()  # As in `Snapshot`.
  merged_tokens: int = 0  # Tokens of that offer.
  # Tokens lost with this update. Negative if a late offer brought in what an
  # earlier update had overwritten.
  overwritten_tokens: int = 0


class Begin(Effect):
  """Boundary: bootstrap is complete; train from this row on."""

  rows: int


class Save(Effect):
  """Boundary: write a checkpoint, which may become the only copy."""


class Cease(Effect):
  """Boundary: make no more inner steps."""


class FetchUpdates(Effect):
  """Pull outer updates of one fragment, of ascending versions, at one go.

  Each is added to the host's copy, which has the version before the first, and
  verified by its CRC before the next one is. The answer is `Rebuilt` with the
  last version; where one fails, `Rebuilt` with the version before it, if any
  succeeded, and `FetchFailed` with the last version.
  """

  updates: tuple[messages.Update, ...]


class FetchFragment(Effect):
  """Pull the full fragment and verify its CRC."""

  message: messages.FullFragment


class Forget(Effect):
  """Release these offers; None means all of them."""

  handles: tuple[int, ...] | None


class Leave(Effect):
  """End this process's part in the run."""

  reason: str
  done: bool = False  # The run is over.
  stopped: bool = False  # It was told to stop.
  refused: bool = False  # By the syncer, for good: a restart would not help.
  # From the syncer, with all steps made; a restart would not help.
  cut_off: bool = False
