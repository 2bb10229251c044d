# SPDX-License-Identifier: Apache-2.0
"""Messages between the processes of one learner.

Only host 0, the *leading host*, speaks with the syncer. The others repeat at
the same boundary what it does, so that all hosts run the same programs in the
same order on the learner's devices; each host moves its own part of the bytes.
An order about bytes has a job number, under which every host answers. That of
an offer is its handle, of a donation its first one.
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
  progress: str  # JSON, as of `learner.restore.progress_of`.


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
  """A new session with the syncer has begun: say where this host offers."""

  job: int
  session: int


@dataclasses.dataclass(frozen=True)
class SyncerAt:
  """Tells the hosts where they pull what the syncer offers to them."""

  session: int
  addresses: tuple[str, ...]  # By host and shard of the syncer.


@dataclasses.dataclass(frozen=True)
class ShardMoved:
  """A shard of the syncer has restarted and offers at these addresses now."""

  session: int
  shard: int
  addresses: tuple[str, ...]  # By host.


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

  job: int
  session: int
  fragment: int
  version: int
  full: bool
  payload: Payload  # In parts, by host and shard of the syncer.
  crc: int  # Of the whole Θ_p.
  part_crcs: tuple[int, ...]  # CRCs of slices of Θ_p, by host and shard.


@dataclasses.dataclass(frozen=True)
class HostFetch:
  """Pull and verify this host's part of a donor's state; adopt it later."""

  job: int
  addresses: tuple[str, ...]  # Of the donor's hosts.
  payloads: tuple[Payload, ...]  # By host in parts: P fragments, the rest.
  versions: tuple[int, ...]
  crcs: tuple[int, ...]  # CRCs of the whole fragments.


@dataclasses.dataclass(frozen=True)
class FetchOver:
  """All hosts have fetched their parts: adopt them, or discard them."""

  job: int
  taken: bool


@dataclasses.dataclass(frozen=True)
class EndDonations:
  """Withdraw what this host offers to a newcomer."""

  newcomer: tuple[int, ...]  # Learner and incarnation; empty: all newcomers.


# From the other hosts ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HostStarted:
  """A host's first message: its number and its complete checkpoints."""

  host: int
  steps: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class HostDone:
  """Answer to an order about bytes: this host's part is done, or failed."""

  job: int
  reason: str = ''  # Why it failed; empty if it did not.
  # Where it is pulled: a session's offers, by shard of the syncer, or a
  # donation.
  addresses: tuple[str, ...] = ()
  # What is on offer: an offer's by shard; of a donation the P fragments, then
  # the inner state.
  parts: tuple[Part, ...] = ()


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
  EndDonations,
)
FROM_OTHER_HOSTS = (HostStarted, HostDone, HostSaved, StopWanted)
