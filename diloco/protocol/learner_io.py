# SPDX-License-Identifier: Apache-2.0
"""What happens to a learner's machine (events) and what it wants (effects).

Effects marked *boundary* are for the training loop: it performs them between
two inner steps, in the order given. All others are for the threads around it.
"""

import dataclasses

from diloco.protocol import messages

# Events ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Connected:
  """A stream to the syncer is open."""

  incarnation: int
  # Where the syncer will pull this learner's offers, by part.
  addresses: tuple[str, ...]
  partition: str = ''  # Over several hosts; '': there is one.


@dataclasses.dataclass(frozen=True)
class Disconnected:
  """It is closed; the shell will try again."""

  reason: str


@dataclasses.dataclass(frozen=True)
class Heard:
  """A message of the syncer."""

  message: object  # One of messages.FROM_SYNCER.


@dataclasses.dataclass(frozen=True)
class Boundary:
  """One more inner step was dispatched; `tokens` went into it."""

  tokens: int


@dataclasses.dataclass(frozen=True)
class Completed:
  """An inner step is done, in this order; what the report says of it."""

  tokens: int
  position: int
  step_s: float
  stall_s: float
  loss: float
  saved_step: int = 0  # As in `messages.Report`.


@dataclasses.dataclass(frozen=True)
class NotOffered:
  """A snapshot has not become an offer: no room, or a newer one is there."""

  fragment: int
  handle: int


@dataclasses.dataclass(frozen=True)
class Rebuilt:
  """The host holds `fragment` of Θ at `version`, proven by its CRC."""

  fragment: int
  version: int
  crc: int
  handle: int  # Of the syncer's offer; it may be retired.


@dataclasses.dataclass(frozen=True)
class FetchFailed:
  """What was fetched did not come, or did not match."""

  fragment: int
  version: int
  reason: str


@dataclasses.dataclass(frozen=True)
class StateFetched:
  """A donor's copy of Θ is the host's, proven; its inner state is here."""

  offered: messages.StateOffered
  donor: int


@dataclasses.dataclass(frozen=True)
class StateFailed:
  """What a donor offered did not come whole."""

  reason: str


@dataclasses.dataclass(frozen=True)
class Stop:
  """The machine goes away: leave in good order, within the notice time."""

  notice_s: float


@dataclasses.dataclass(frozen=True)
class Tick:
  """Nothing but the passing of time: a deadline was reached."""


# Effects ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Send:
  """Send a message to the syncer."""

  message: object  # One of messages.FROM_LEARNER.


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """Boundary: copy the fragment, encode it against its base, offer it."""

  handle: int  # Of the offer; in this process no other has it.
  keep: tuple[int, ...]  # Of its fragment's copies, those still of use.
  round: int
  fragment: int
  base_version: int
  c_steps: int
  c_tokens: int
  step: int


@dataclasses.dataclass(frozen=True)
class HandIn:
  """Boundary: after the snapshots before it are offered, say `HandedIn`."""

  last_round: int


@dataclasses.dataclass(frozen=True)
class SayLeaving:
  """Boundary: after the snapshots before it are offered, say `Leaving`."""


@dataclasses.dataclass(frozen=True)
class DonateState:
  """Boundary: copy the inner state, offer it and Θ to a newcomer."""

  learner: int  # The newcomer, and its session.
  incarnation: int
  step: int


@dataclasses.dataclass(frozen=True)
class EndDonation:
  """Withdraw what was offered to a newcomer."""

  learner: int
  incarnation: int


@dataclasses.dataclass(frozen=True)
class DonateFragment:
  """Offer the syncer the host's copy of a fragment, which is of `version`."""

  fragment: int
  version: int


@dataclasses.dataclass(frozen=True)
class FetchState:
  """Pull what a donor offers."""

  state: messages.StateAt


@dataclasses.dataclass(frozen=True)
class Adopt:
  """Boundary: the inner state that was fetched is this learner's."""


@dataclasses.dataclass(frozen=True)
class Reset:
  """Boundary: the inner state that the process has is not to be trusted."""


@dataclasses.dataclass(frozen=True)
class Apply:
  """Boundary: blend the host's `version` of the fragment into θ.

  With `carry`, what came after the copy of `handle` stays.
  Without, what the blend rule leaves of θ is no progress of the learner's.

  Of the learner's tokens of this fragment: trained = the sums of
  `merged_tokens` and `overwritten_tokens` + those still to be offered.
  """

  fragment: int
  version: int
  carry: bool
  handle: int = 0  # Of its own offer that was merged; 0: none was.
  keep: tuple[int, ...] = ()  # As in `Snapshot`.
  merged_tokens: int = 0  # Of that offer.
  # Lost with this. Negative where an earlier update has overwritten what a
  # late offer brought in after all.
  overwritten_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Begin:
  """Boundary: bootstrap is complete, training starts at this data position."""

  position: int


@dataclasses.dataclass(frozen=True)
class Save:
  """Boundary: write a checkpoint: what this process has may be all there is."""


@dataclasses.dataclass(frozen=True)
class Cease:
  """Boundary: no more inner steps."""


@dataclasses.dataclass(frozen=True)
class FetchUpdate:
  """Pull the outer update, add it to the host's copy, prove the CRC."""

  update: messages.Update


@dataclasses.dataclass(frozen=True)
class FetchFragment:
  """Pull the full fragment, prove the CRC."""

  message: messages.FullFragment


@dataclasses.dataclass(frozen=True)
class Forget:
  """Retire these offers; None: all of them."""

  handles: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Leave:
  """The run is over for this process."""

  reason: str
  done: bool = False  # The run is over.
  stopped: bool = False  # As it was asked to.
  refused: bool = False  # By the syncer, for good: a restart would not help.
  cut_off: bool = False  # From the syncer, with all steps made: likewise.


Event = (
  Connected
  | Disconnected
  | Heard
  | Boundary
  | Completed
  | NotOffered
  | Rebuilt
  | FetchFailed
  | StateFetched
  | StateFailed
  | Stop
  | Tick
)
Effect = (
  Send
  | Snapshot
  | HandIn
  | SayLeaving
  | DonateState
  | EndDonation
  | DonateFragment
  | FetchState
  | Adopt
  | Reset
  | Apply
  | Begin
  | Save
  | Cease
  | FetchUpdate
  | FetchFragment
  | Forget
  | Leave
)
