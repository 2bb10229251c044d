# SPDX-License-Identifier: Apache-2.0
"""What the lead of a sharded syncer and its other shards say to each other.

The lead has the machine: it decides, and orders. A shard has the bytes of its
pieces: it does what it is told, in the order in which it is told, and answers
by `job`, a number that the lead gave. Bytes go directly between learners and
shards. What the lead does with its own pieces is ordered in the same words.
"""

import dataclasses

from diloco.protocol import messages
from diloco.protocol.messages import Part, Payload

# From a shard --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ShardHello:
  """The first message of a shard's session; tuples are by own fragment."""

  protocol: int
  run: str
  shard: int
  process: int  # Rises with every process of this shard.
  fingerprints: dict[str, str]
  fragments: tuple[int, ...]  # Of which it owns any, in ascending order.
  versions: tuple[int, ...]  # Of the Θ_p that it holds,
  crcs: tuple[tuple[int, ...], ...]  # and of its pieces' bytes;
  outer_versions: tuple[int, ...]  # the outer state belongs to these,
  outer_crcs: tuple[tuple[int, ...], ...]  # with these bytes.
  address: str  # Where the lead pulls what it collects.


@dataclasses.dataclass(frozen=True)
class Admitted:
  """Answer to `Admit`."""

  learner: int
  incarnation: int
  # Where the learner's processes pull; none: theirs were of no use.
  addresses: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PartPulled:
  """Answer to `PullPart`: whole and finite."""

  job: int
  norm: float  # L2, of the own pieces of v_m.


@dataclasses.dataclass(frozen=True)
class PartFailed:
  """Answer to `PullPart` and `TakePart` where it did not come to that."""

  job: int
  reason: str
  unusable: bool  # The bytes came, and must not be merged.


@dataclasses.dataclass(frozen=True)
class PartMerged:
  """Answer to `MergePart`: the outer step is done, and not installed."""

  job: int
  crcs: tuple[int, ...]  # Of the resulting pieces.
  part: Part  # Of the outer update.


@dataclasses.dataclass(frozen=True)
class HostParts:
  """What of a part each host of a learner of several hosts is offered."""

  learner: int
  incarnation: int
  parts: tuple[Part, ...]  # By host.
  crcs: tuple[int, ...]  # Of its boxes of the resulting Θ_p, by host.


@dataclasses.dataclass(frozen=True)
class PartOffered:
  """Answer to `PublishPart`, `ServePart`, `CollectPart`: it is there."""

  job: int
  part: Part  # For a learner of one host.
  hosts: tuple[HostParts, ...]  # For the others.


@dataclasses.dataclass(frozen=True)
class PartTaken:
  """Answer to `TakePart`: the bytes are here, and not installed."""

  job: int
  crcs: tuple[int, ...]  # Of the pieces.


@dataclasses.dataclass(frozen=True)
class Saved:
  """Answer to `SaveParts`, where it was asked to wait for the disk."""

  job: int


# From the lead -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Accepted:
  """Answer to a `ShardHello`; what was begun for another lead is void."""


@dataclasses.dataclass(frozen=True)
class Admit:
  """A session of a learner has begun."""

  learner: int
  incarnation: int
  addresses: tuple[str, ...]  # Where its part is pulled, by its processes.
  partition: str  # As in its hello.


@dataclasses.dataclass(frozen=True)
class Release:
  """It has ended."""

  learner: int
  incarnation: int


@dataclasses.dataclass(frozen=True)
class PullPart:
  """Pull the own part of an offer, for a round."""

  job: int
  round: int
  learner: int
  incarnation: int
  fragment: int
  payload: Payload


@dataclasses.dataclass(frozen=True)
class CancelPart:
  """What `pull` brings, or has brought, is wanted no more."""

  pull: int  # A job of `PullPart`.


@dataclasses.dataclass(frozen=True)
class MergePart:
  """Merge what these jobs pulled, by ascending learner; step, encode."""

  job: int
  round: int
  fragment: int
  pulls: tuple[int, ...]
  learners: tuple[int, ...]
  weights: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Recipient:
  """A session, and the handle under which it will find something."""

  learner: int
  incarnation: int
  handle: int


@dataclasses.dataclass(frozen=True)
class InstallPart:
  """What `merge` led to is Θ_p from now on."""

  merge: int  # A job of `MergePart`.
  round: int
  fragment: int


@dataclasses.dataclass(frozen=True)
class PublishPart:
  """Offer the outer update that `merge` led to."""

  job: int
  merge: int  # A job of `MergePart`.
  fragment: int
  recipients: tuple[Recipient, ...]


@dataclasses.dataclass(frozen=True)
class ServePart:
  """Offer the own part of the full fragment."""

  job: int
  fragment: int
  recipient: Recipient


@dataclasses.dataclass(frozen=True)
class TakePart:
  """Pull the own part of a learner's copy of a lost fragment."""

  job: int
  learner: int
  incarnation: int
  fragment: int
  payload: Payload


@dataclasses.dataclass(frozen=True)
class GoOn:
  """Θ_p is at `version` from now on: what `taken` brought, or what is here."""

  fragment: int
  version: int
  taken: int  # A job of `TakePart`; 0: nothing was brought.


@dataclasses.dataclass(frozen=True)
class RetireParts:
  """A learner does not need these offers any longer."""

  learner: int
  incarnation: int
  handles: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SaveParts:
  """Write a checkpoint of everything, as it is after this round."""

  job: int
  closed_round: int
  losses: tuple[float, ...]  # Of Θ, where it is known.
  wait: bool  # Until it is on the disk.


@dataclasses.dataclass(frozen=True)
class CollectPart:
  """Offer the lead the own part of the full fragment, under `job`."""

  job: int
  fragment: int


@dataclasses.dataclass(frozen=True)
class Depart:
  """The run is over."""


FROM_SHARD = (
  ShardHello,
  messages.Alive,
  Admitted,
  PartPulled,
  PartFailed,
  PartMerged,
  PartOffered,
  PartTaken,
  Saved,
)
FROM_LEAD = (
  messages.Refusal,
  Accepted,
  Admit,
  Release,
  PullPart,
  CancelPart,
  MergePart,
  InstallPart,
  PublishPart,
  ServePart,
  TakePart,
  GoOn,
  RetireParts,
  SaveParts,
  CollectPart,
  Depart,
)
