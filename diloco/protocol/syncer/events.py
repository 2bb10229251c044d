# SPDX-License-Identifier: Apache-2.0
"""Events and effects of the syncer's machine.

Both sets are closed. Effects are performed in the order in which they are
returned; an effect says what to do, the driver that performs it knows how.
"""

import dataclasses
import functools

from diloco.protocol import messages

# Events ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Heard:
  """A session sent a message; `messages.Hello` opens a session."""

  learner: int
  incarnation: int
  message: object  # One of messages.FROM_LEARNER.


@dataclasses.dataclass(frozen=True)
class Lost:
  """The stream of a session has closed."""

  learner: int
  incarnation: int
  reason: str


@dataclasses.dataclass(frozen=True)
class Pulled:
  """The bytes of a contribution are here, complete and finite."""

  round: int
  learner: int
  incarnation: int
  handle: int  # Of the offer, as in the `Pull` that this answers.
  norm: float  # L2 norm of the whole outer gradient v_m.


@dataclasses.dataclass(frozen=True)
class PullFailed:
  """A pull has ended without usable bytes."""

  round: int
  learner: int
  incarnation: int
  handle: int  # Of the offer, as in the `Pull` that this answers.
  reason: str
  unusable: bool  # The bytes came, but must not be merged: a strike.


@dataclasses.dataclass(frozen=True)
class FragmentTaken:
  """A learner's copy of a lost fragment is now Θ_p, verified by its CRC."""

  fragment: int
  learner: int
  incarnation: int


@dataclasses.dataclass(frozen=True)
class FragmentFailed:
  """A lost fragment did not arrive, or its CRC did not match."""

  fragment: int
  learner: int
  incarnation: int
  reason: str


@dataclasses.dataclass(frozen=True)
class Merged:
  """The outer step of a round is done; Θ_p is the new one."""

  round: int


@dataclasses.dataclass(frozen=True)
class Absent:
  """A shard is gone, with all work in progress on these fragments."""

  fragments: tuple[int, ...]
  reason: str


@dataclasses.dataclass(frozen=True)
class Held:
  """A fragment whose shards are all here (again), with what they hold."""

  fragment: int
  version: int  # The oldest version of its pieces.
  crc: int | None  # CRC of the run's bytes, from the ledger.
  same: bool = True  # False: the bytes differ from the run's at that version.


@dataclasses.dataclass(frozen=True)
class Back:
  """Shards are here (again)."""

  held: tuple[Held, ...]


@dataclasses.dataclass(frozen=True)
class Tick:
  """Time has passed: a deadline was reached."""


# Effects ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Share:
  """One contribution to a merge."""

  learner: int
  incarnation: int
  weight: float  # Normalised over the round.
  handle: int  # Handle of the offer whose bytes were merged.
  age_s: float  # From the arrival of the offer to the end of the window.
  age_steps: float  # `age_s` in the learner's own steps.
  base_version: int
  c_steps: int
  c_tokens: int
  step: int  # The learner's own step at the snapshot.


@dataclasses.dataclass(frozen=True)
class AdmitLearner:
  """Send a `messages.Welcome`; the driver adds CRCs and addresses."""

  learner: int
  incarnation: int
  step: int
  closed_round: int
  versions: tuple[int, ...]
  position: int
  live: tuple[int, ...]
  clean: bool
  lost_crcs: tuple[tuple[int, int], ...]  # (p, CRC) of fragments not here.


@dataclasses.dataclass(frozen=True)
class Send:
  """Send a message unchanged."""

  learner: int
  incarnation: int
  message: object  # One of messages.FROM_SYNCER.


@dataclasses.dataclass(frozen=True)
class EndSession:
  """End a session: close its stream, its pulls and its offers."""

  learner: int
  incarnation: int
  reason: str


@dataclasses.dataclass(frozen=True)
class Pull:
  """Pull an offer; answer with `Pulled` or `PullFailed`.

  There is one answer, with the handle of the offer, unless the pull is
  cancelled first.
  """

  round: int
  learner: int
  incarnation: int
  offer: messages.Offer


@dataclasses.dataclass(frozen=True)
class CancelPull:
  """Stop pulling an offer and free the memory of its bytes.

  A pull that has not begun is dropped; one in progress ends without an event.
  """

  round: int
  learner: int
  incarnation: int
  handle: int


@dataclasses.dataclass(frozen=True)
class Merge:
  """Merge these contributions, step the outer optimizer, say `Merged`."""

  round: int
  fragment: int
  version: int  # The resulting version.
  step: int  # t.
  shares: tuple[Share, ...]  # In ascending learner id.
  quorum_s: float  # From due to quorum, in seconds.
  grace_s: float  # From quorum to the end of the window.
  reason: str  # Why the window ended.


@dataclasses.dataclass(frozen=True)
class KeepLedger:
  """Write the ledger before any following effect is performed."""


@dataclasses.dataclass(frozen=True)
class Publish:
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


@dataclasses.dataclass(frozen=True)
class SendFull:
  """Offer the full fragment to one session and announce it."""

  learner: int
  incarnation: int
  fragment: int
  reason: str
  merged: tuple[int, int]  # Incarnation, handle; see `messages.FullFragment`.


@dataclasses.dataclass(frozen=True)
class TakeFragment:
  """Pull a learner's copy of a lost fragment; there is always an answer.

  It becomes Θ_p at `version`, combined with the checkpoint's outer optimizer
  state and residual.
  """

  learner: int
  incarnation: int
  version: int
  crc: int
  offered: messages.FragmentOffered


@dataclasses.dataclass(frozen=True)
class AdoptVersion:
  """Make a lost fragment Θ_p at `version`.

  The bytes are those taken from a session or, if no learner has it, those here.
  """

  fragment: int
  version: int
  taken_of: tuple[int, int] | None  # (learner, incarnation); None: none.


@dataclasses.dataclass(frozen=True)
class Retire:
  """Release these handles, which were offered to the session."""

  learner: int
  incarnation: int
  handles: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LogDecision:
  """Record a decision that no other effect shows."""

  kind: str  # 'joined', 'ready', 'left', 'refused', 'zombie', …
  learner: int
  reason: str


@dataclasses.dataclass(frozen=True)
class End:
  """The run is over: write Θ and leave."""

  step: int
  closed_round: int


Event = (
  Heard
  | Lost
  | Pulled
  | PullFailed
  | Merged
  | FragmentTaken
  | FragmentFailed
  | Absent
  | Back
  | Tick
)
Effect = (
  AdmitLearner
  | Send
  | EndSession
  | Pull
  | CancelPull
  | Merge
  | KeepLedger
  | Publish
  | SendFull
  | TakeFragment
  | AdoptVersion
  | Retire
  | LogDecision
  | End
)
