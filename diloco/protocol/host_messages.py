# SPDX-License-Identifier: Apache-2.0
"""What the processes of one learner say to each other.

Host 0, the *leading host*, alone speaks with the syncer. The others do at the
same boundary what it does, so that all hosts run the same programs in the same
order on the learner's devices; and each moves its own part of the bytes.
"""

import dataclasses

from diloco.protocol.messages import Part, Payload

# While the hosts meet, before JAX connects them -------------------------------


@dataclasses.dataclass(frozen=True)
class HostHere:
  """The first message of hosts 1 … N−1 to host 0, once both have proven to
  be of this learner."""

  host: int  # By the launcher's number.


@dataclasses.dataclass(frozen=True)
class JaxAt:
  """All are here: where host 0 has the coordination service of JAX."""

  address: str


@dataclasses.dataclass(frozen=True)
class AllConnected:
  """This host has its connections; the meeting is over for it."""


# From the leading host, for the loop of the others: in order, at boundaries ---


@dataclasses.dataclass(frozen=True)
class MakeStep:
  """Dispatch one inner step."""

  position: int  # Of its batch.
  lr: float


@dataclasses.dataclass(frozen=True)
class TakeSnapshot:
  """Copy a fragment; offer this host's part of it, if there is a session."""

  fragment: int
  session: int  # 0: nobody asks for it.
  handle: int
  keep: tuple[int, ...]  # See `learner_io.Snapshot`.


@dataclasses.dataclass(frozen=True)
class ApplyFragment:
  """Blend in what has arrived, or overwrite where nothing was trained yet."""

  fragment: int
  version: int
  blended: bool
  carry: bool  # The rest as in `learner_io.Apply`.
  handle: int
  keep: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ResetState:
  """The inner state begins anew."""


@dataclasses.dataclass(frozen=True)
class DonateAt:
  """Copy this host's Θ and inner state of this boundary; offer them."""

  learner: int  # The newcomer, and its session.
  incarnation: int
  handles: tuple[int, ...]  # As many as any host can need.


@dataclasses.dataclass(frozen=True)
class AdoptState:
  """The inner state becomes what this host has taken of a donor's."""


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
  """Which checkpoint all hosts go on from; −1: none."""

  step: int


@dataclasses.dataclass(frozen=True)
class OpenSession:
  """There is a new session with the syncer: make an outlet for it."""

  session: int


@dataclasses.dataclass(frozen=True)
class SyncerAt:
  """Where this host pulls what the syncer offers to it."""

  session: int
  addresses: tuple[str, ...]  # By shard of the syncer.


@dataclasses.dataclass(frozen=True)
class ShardMoved:
  """A shard of the syncer has begun anew: where it offers from now on."""

  session: int
  shard: int
  address: str


@dataclasses.dataclass(frozen=True)
class CloseSession:
  """It has ended, with all that was offered in it."""

  session: int


@dataclasses.dataclass(frozen=True)
class HostRetire:
  """These offers will not be pulled (again)."""

  session: int
  handles: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class OfferHeld:
  """Offer this host's part of Θ_p, for a syncer that has lost it."""

  session: int
  fragment: int
  handle: int


@dataclasses.dataclass(frozen=True)
class HostTake:
  """Pull this host's part of an update or of a full fragment, and prove it."""

  session: int
  fragment: int
  version: int
  full: bool
  payloads: tuple[Payload, ...]  # Of this host, by shard of the syncer.
  crc: int  # Of the whole Θ_p.
  part_crcs: tuple[int, ...]  # Of this host's boxes of it, by shard.


@dataclasses.dataclass(frozen=True)
class HostFetch:
  """Pull this host's part of a donor's state, prove it, and keep it apart."""

  address: str  # Of the donor's host of the same number.
  payloads: tuple[Payload, ...]  # Of this host, P fragments first.
  versions: tuple[int, ...]
  crcs: tuple[int, ...]  # Of the whole fragments.


@dataclasses.dataclass(frozen=True)
class FetchOver:
  """All hosts have what they were to fetch: take it. Or forget it."""

  taken: bool


@dataclasses.dataclass(frozen=True)
class HostDonationOver:
  """A newcomer needs this host's offer no longer."""

  learner: int
  incarnation: int


@dataclasses.dataclass(frozen=True)
class HostDonationsOver:
  """No newcomer does."""


# From the other hosts ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HostStarted:
  """Its first message: who it is, and which checkpoints it has whole."""

  host: int
  steps: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SessionAt:
  """Where the syncer pulls what this host offers in a session."""

  session: int
  addresses: tuple[str, ...]  # By shard of the syncer.


@dataclasses.dataclass(frozen=True)
class HostOffered:
  """Its part is on offer."""

  handle: int
  parts: tuple[Part, ...]  # By shard of the syncer; none: it could not.


@dataclasses.dataclass(frozen=True)
class HostTook:
  """What came of `HostTake`."""

  fragment: int
  version: int
  reason: str  # Why it failed; empty: it is here, and proven.


@dataclasses.dataclass(frozen=True)
class HostDonated:
  """Its part of Θ and of the inner state is on offer to a newcomer."""

  learner: int
  incarnation: int
  address: str  # '': it could not.
  parts: tuple[Part, ...]  # P fragments, then the inner state.


@dataclasses.dataclass(frozen=True)
class HostFetched:
  """What came of `HostFetch`."""

  reason: str  # Why it failed; empty: it is here, and proven.


@dataclasses.dataclass(frozen=True)
class HostAdopted:
  """What it fetched has become its copy of Θ."""


@dataclasses.dataclass(frozen=True)
class StopWanted:
  """This host was told to go: the learner is to leave in good order."""


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
  StopWanted,
)
