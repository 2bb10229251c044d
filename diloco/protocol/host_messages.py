# SPDX-License-Identifier: Apache-2.0
"""Messages between the processes of one learner.

Only host 0, the *leading host*, speaks with the syncer. The others repeat at
the same boundary what it does, so that all hosts run the same programs in the
same order on the learner's devices; each host moves its own part of the bytes.
"""

import dataclasses

from diloco.protocol.messages import Part, Payload

# While the hosts meet, before JAX connects them -------------------------------


@dataclasses.dataclass(frozen=True)
class HostHere:
  """The first message of hosts 1 … N−1 to host 0, once authenticated."""

  host: int  # The host number that the launcher gave.


@dataclasses.dataclass(frozen=True)
class JaxAt:
  """All hosts are here; gives the address of JAX's coordination service."""

  address: str


@dataclasses.dataclass(frozen=True)
class AllConnected:
  """This host has all its connections; the rendezvous is over for it."""


# From the leading host, for the loop of the others: in order, at boundaries ---


@dataclasses.dataclass(frozen=True)
class MakeStep:
  """Dispatch one inner step."""

  position: int  # Index of its batch.
  lr: float


@dataclasses.dataclass(frozen=True)
class TakeSnapshot:
  """Copy a fragment; offer this host's part of it, if there is a session."""

  fragment: int
  session: int  # 0: there is no session, so nothing is offered.
  handle: int
  keep: tuple[int, ...]  # See `learner.events.Snapshot`.


@dataclasses.dataclass(frozen=True)
class ApplyFragment:
  """Blend in the update, or overwrite before the first step."""

  fragment: int
  version: int
  blended: bool
  carry: bool  # For the other fields see `learner.events.Apply`.
  handle: int
  keep: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ResetState:
  """Reset the inner optimizer state to its initial value."""


@dataclasses.dataclass(frozen=True)
class DonateAt:
  """Copy this host's Θ and inner state at this boundary, and offer them."""

  learner: int  # The newcomer, and its session.
  incarnation: int
  handles: tuple[int, ...]  # Enough for the host that needs most.


@dataclasses.dataclass(frozen=True)
class AdoptState:
  """Replace the inner state by the donor's, which this host has fetched."""


@dataclasses.dataclass(frozen=True)
class BeginAt:
  """Training begins with the batch at this position."""

  position: int


@dataclasses.dataclass(frozen=True)
class SaveAt:
  """Begin a checkpoint of this boundary."""

  step: int
  loss: float
  progress: str  # JSON of `checkpoint.learner_records.LearnerProgress`.


@dataclasses.dataclass(frozen=True)
class EndAt:
  """The process ends with this exit code."""

  code: int
  reason: str


# From the leading host, for the threads of the others -------------------------


@dataclasses.dataclass(frozen=True)
class RestoreFrom:
  """The checkpoint that all hosts resume from; −1 means none."""

  step: int


@dataclasses.dataclass(frozen=True)
class OpenSession:
  """A new session with the syncer has begun: create its publisher."""

  session: int


@dataclasses.dataclass(frozen=True)
class SyncerAt:
  """Tells a host where it pulls what the syncer offers to it."""

  session: int
  addresses: tuple[str, ...]  # By shard of the syncer.


@dataclasses.dataclass(frozen=True)
class ShardMoved:
  """A shard of the syncer has restarted and offers at these addresses now."""

  session: int
  shard: int
  address: str


@dataclasses.dataclass(frozen=True)
class CloseSession:
  """The session has ended, and with it all that was offered in it."""

  session: int


@dataclasses.dataclass(frozen=True)
class HostRetire:
  """These offers will not be pulled (any more)."""

  session: int
  handles: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class OfferHeld:
  """Offer this host's part of Θ_p to a syncer that has lost it."""

  session: int
  fragment: int
  handle: int


@dataclasses.dataclass(frozen=True)
class HostTake:
  """Pull and verify this host's part of an update or of a full fragment."""

  session: int
  fragment: int
  version: int
  full: bool
  payloads: tuple[Payload, ...]  # For this host, by shard of the syncer.
  crc: int  # Of the whole Θ_p.
  part_crcs: tuple[int, ...]  # CRC of this host's slices of Θ_p, by shard.


@dataclasses.dataclass(frozen=True)
class HostFetch:
  """Pull and verify this host's part of a donor's state; adopt it later."""

  address: str  # Address of the donor's host of the same number.
  payloads: tuple[Payload, ...]  # For this host: P fragments, then the rest.
  versions: tuple[int, ...]
  crcs: tuple[int, ...]  # CRCs of the whole fragments.


@dataclasses.dataclass(frozen=True)
class FetchOver:
  """All hosts have fetched their parts: adopt them, or discard them."""

  taken: bool


@dataclasses.dataclass(frozen=True)
class HostDonationOver:
  """A newcomer no longer needs this host's offer."""

  learner: int
  incarnation: int


@dataclasses.dataclass(frozen=True)
class HostDonationsOver:
  """No newcomer needs this host's offers any longer."""


# From the other hosts ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HostStarted:
  """A host's first message: its number and its complete checkpoints."""

  host: int
  steps: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SessionAt:
  """Tells where the syncer pulls what this host offers in a session."""

  session: int
  addresses: tuple[str, ...]  # By shard of the syncer.


@dataclasses.dataclass(frozen=True)
class HostOffered:
  """This host's part is on offer."""

  handle: int
  parts: tuple[Part, ...]  # By shard of the syncer; empty if it failed.


@dataclasses.dataclass(frozen=True)
class HostTook:
  """The result of `HostTake`."""

  fragment: int
  version: int
  reason: str  # Why it failed; empty if it is here and verified.


@dataclasses.dataclass(frozen=True)
class HostDonated:
  """This host's part of Θ and of the inner state is on offer to a newcomer."""

  learner: int
  incarnation: int
  address: str  # Empty if it failed.
  parts: tuple[Part, ...]  # P fragments, then the inner state.


@dataclasses.dataclass(frozen=True)
class HostFetched:
  """The result of `HostFetch`."""

  reason: str  # Why it failed; empty if it is here and verified.


@dataclasses.dataclass(frozen=True)
class HostAdopted:
  """This host has made what it fetched its copy of Θ."""


@dataclasses.dataclass(frozen=True)
class HostSaved:
  """This host's save of a step is over, whether it was completed or not."""

  step: int


@dataclasses.dataclass(frozen=True)
class StopWanted:
  """This host was told to stop: the learner has to leave in good order."""


FROM_FIRST_HOST = (JaxAt, AllConnected)
TO_FIRST_HOST = (HostHere, AllConnected)
FROM_LEADING_HOST = (
  MakeStep,
  TakeSnapshot,
  ApplyFragment,
  ResetState,
  DonateAt,
  AdoptState,
  BeginAt,
  SaveAt,
  EndAt,
  RestoreFrom,
  OpenSession,
  SyncerAt,
  ShardMoved,
  CloseSession,
  HostRetire,
  OfferHeld,
  HostTake,
  HostFetch,
  FetchOver,
  HostDonationOver,
  HostDonationsOver,
)
FROM_OTHER_HOSTS = (
  HostStarted,
  SessionAt,
  HostOffered,
  HostTook,
  HostDonated,
  HostFetched,
  HostAdopted,
  HostSaved,
  StopWanted,
)
