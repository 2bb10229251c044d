# SPDX-License-Identifier: Apache-2.0
"""Events and effects of the syncer's machine.

Both sets are closed. Effects are performed in the order in which they are
returned; an effect says what to do, the driver that performs it knows how.
"""

import functools

from diloco.protocol import messages
from diloco.protocol.messages import SessionKey
from diloco.protocol.values import Value

# Events ----------------------------------------------------------------------


class Event(Value):
  """An input of the syncer's machine."""


class Heard(SessionKey, Event):
  """A session sent a message; `messages.Hello` opens a session."""

  message: object  # One of messages.FROM_LEARNER.


class Lost(SessionKey, Event):
  """The stream of a session has closed."""

  reason: str


class PullKey(Value):
  """Names the pull of one offer, for one round."""

  round: int
  learner: int
  incarnation: int
  handle: int  # Of the offer.


class Pulled(PullKey, Event):
  """The bytes of a contribution are here, complete and finite."""

  norm: float  # L2 norm of the whole outer gradient v_m.


class PullFailed(PullKey, Event):
  """A pull has ended without usable bytes."""

  reason: str
  unusable: bool  # The bytes came, but must not be merged: a strike.


class FragmentTaken(Event):
  """A learner's copy of a lost fragment is now Θ_p, verified by its CRC."""

  fragment: int
  learner: int
  incarnation: int


class FragmentFailed(Event):
  """A lost fragment did not arrive, or its CRC did not match."""

  fragment: int
  learner: int
  incarnation: int
  reason: str


class Merged(Event):
  """The outer step of a round is done; Θ_p is the new one."""

  round: int


class ShardLost(Event):
  """A shard is gone, with all work in progress on these fragments."""

  fragments: tuple[int, ...]
  reason: str


class Held(Value):
  """A fragment whose shards are all here (again), with what they hold."""

  fragment: int
  version: int  # The oldest version of its pieces.
  crc: int | None  # CRC of the run's bytes, from the ledger.
  same: bool = True  # False: the bytes differ from the run's at that version.


class ShardReturned(Event):
  """Shards are here (again)."""

  held: tuple[Held, ...]


class Tick(Event):
  """Time has passed: a deadline was reached."""


# Effects ---------------------------------------------------------------------


class Effect(Value):
  """An output of the syncer's machine, for its driver to perform."""


class Share(messages.Contribution, SessionKey):
  """One contribution to a merge."""

  weight: float  # Normalised over the round.
  handle: int  # Handle of the offer whose bytes were merged.
  age_s: float  # From the arrival of the offer to the end of the window.
  age_steps: float  # `age_s` in the learner's own steps.


class AdmitLearner(SessionKey, Effect):
  """Send a `messages.Welcome`; the driver adds CRCs and addresses."""

  step: int
  closed_round: int
  versions: tuple[int, ...]
  rows: int
  live: tuple[int, ...]
  clean: bool
  lost_crcs: tuple[tuple[int, int], ...]  # (p, CRC) of fragments not here.


class Send(SessionKey, Effect):
  """Send a message unchanged."""

  message: object  # One of messages.FROM_SYNCER.


class EndSession(SessionKey, Effect):
  """End a session: close its stream, its pulls and its offers."""

  reason: str


class Pull(Effect):
  """Pull an offer; answer with `Pulled` or `PullFailed`.

  There is one answer, with the handle of the offer, unless the pull is
  cancelled first.
  """

  round: int
  learner: int
  incarnation: int
  offer: messages.Offer


class CancelPull(PullKey, Effect):
  """Stop pulling an offer and free the memory of its bytes.

  A pull that has not begun is dropped; one in progress ends without an event.
  """


class Merge(Effect):
  """Merge these contributions, step the outer optimizer, say `Merged`."""

  round: int
  fragment: int
  version: int  # The resulting version.
  step: int  # t.
  shares: tuple[Share, ...]  # In ascending learner id.
  quorum_s: float  # From due to quorum, in seconds.
  grace_s: float  # From quorum to the end of the window.
  reason: str  # Why the window ended.


class KeepLedger(Effect):
  """Write the ledger before any following effect is performed."""


class Publish(Effect):
  """Offer the outer update to every session and announce it."""

  round: int
  fragment: int
  version: int
  step: int
  shares: tuple[Share, ...]
  recipients: tuple[tuple[int, int], ...]  # (learner, incarnation).
  reported_steps: tuple[int, ...]  # By recipient, as in `messages.Update`.
  sync_s: float  # From the first pull to the end of the merge.

  def update(
    self,
    recipient: tuple[int, int],
    payload: messages.Payload,
    crc: int,
    part_crcs: tuple[int, ...] = (),
  ) -> messages.Update:
    """Returns the message that announces the update to one recipient."""
    return messages.Update(
      round=self.round,
      fragment=self.fragment,
      version=self.version,
      step=self.step,
      reported_step=self._known_steps[recipient],
      **self._of_shares,
      payload=payload,
      crc=crc,
      part_crcs=part_crcs,
    )

  # Computed once for all recipients, like the next. A copy by `changed` would
  # keep both: nothing changes an effect once its updates have been made.
  @functools.cached_property
  def _known_steps(self) -> dict[tuple[int, int], int]:
    return dict(zip(self.recipients, self.reported_steps))

  @functools.cached_property
  def _of_shares(self) -> dict[str, tuple]:
    """The fields of `messages.Update` that name what was merged."""
    return {
      'participants': tuple(share.learner for share in self.shares),
      'weights': tuple(share.weight for share in self.shares),
      'incarnations': tuple(share.incarnation for share in self.shares),
      'handles': tuple(share.handle for share in self.shares),
      'ages_steps': tuple(share.age_steps for share in self.shares),
    }


class SendFull(SessionKey, Effect):
  """Offer the full fragment to one session and announce it."""

  fragment: int
  reason: str
  merged: tuple[int, int]  # Incarnation, handle; see `messages.FullFragment`.


class TakeFragment(SessionKey, Effect):
  """Pull a learner's copy of a lost fragment; there is always an answer.

  It becomes Θ_p at `version`, combined with the checkpoint's outer optimizer
  state and residual.
  """

  version: int
  crc: int
  offered: messages.FragmentOffered


class AdoptVersion(Effect):
  """Make a lost fragment Θ_p at `version`.

  The bytes are those taken from a session or, if no learner has it, those here.
  """

  fragment: int
  version: int
  taken_of: tuple[int, int] | None  # (learner, incarnation); None: none.


class Retire(SessionKey, Effect):
  """Release these handles, which were offered to the session."""

  handles: tuple[int, ...]


class LogDecision(Effect):
  """Record a decision that no other effect shows."""

  kind: str  # 'joined', 'ready', 'left', 'refused', 'zombie', …
  learner: int
  reason: str


class LogReformed(SessionKey, Effect):
  """Record that a learner goes on with other slices."""

  slices_before: int
  slices: int  # That take part now,
  slices_of: int  # of so many.
  step: int  # Own step of its state.
  # Reported, and after that boundary; 0 if its state is not its own.
  lost_steps: int
  lost_tokens: int
  reason: str  # Where its state is from, for humans.


class End(Effect):
  """The run is over: write Θ and leave."""

  step: int
  closed_round: int
