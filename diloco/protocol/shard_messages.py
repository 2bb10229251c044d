# SPDX-License-Identifier: Apache-2.0
"""Messages between the leader of a sharded syncer and its other shards.

The leader has the state machine: it decides, and gives orders. A shard holds
the bytes of its pieces, executes its orders in sequence, and answers by `job`,
a number that the leader assigned. Bytes go directly between learners and
shards. The leader's work on its own pieces uses the same messages.
"""

from diloco.protocol import messages
from diloco.protocol.messages import Part, Payload, SessionKey
from diloco.protocol.values import Value

# From a shard --------------------------------------------------------------


class FromShard(Value):
  """A message that a shard may send to the leader."""


class ShardHello(FromShard):
  """The first message of a shard's session; tuples are by own fragment."""

  protocol: int
  run: str
  shard: int
  process: int  # Rises with every process of this shard.
  fingerprints: dict[str, str]
  # Those of which it owns a piece, in ascending order.
  fragments: tuple[int, ...]
  versions: tuple[int, ...]  # Versions of its Θ_p,
  crcs: tuple[tuple[int, ...], ...]  # and CRCs of its pieces;
  outer_versions: tuple[int, ...]  # versions of its outer state,
  outer_crcs: tuple[tuple[int, ...], ...]  # and CRCs of those bytes.
  address: str  # Where the leader pulls what it collects.


class Admitted(SessionKey, FromShard):
  """Answer to `Admit`."""

  # Where the learner's processes pull; empty if its own were unusable.
  addresses: tuple[str, ...]


class PartPulled(FromShard):
  """Answer to `PullPart`: an offer's bytes are complete and finite."""

  job: int
  norm: float  # L2 norm of the own pieces of v_m.


class PartFailed(FromShard):
  """Answer to a `PullPart` that failed."""

  job: int
  reason: str
  unusable: bool  # The bytes came, but must not be merged.


class PartMerged(FromShard):
  """Answer to `MergePart`: the outer step is done, but not installed."""

  job: int
  crcs: tuple[int, ...]  # CRCs of the resulting pieces.
  part: Part  # The outer update's bytes.


class HostParts(SessionKey):
  """The share of a part that each host of a learner is offered."""

  parts: tuple[Part, ...]  # By host.
  crcs: tuple[int, ...]  # CRC of its slices of the resulting Θ_p, by host.


class PartOffered(FromShard):
  """Answer to `OfferPart`: it is on offer."""

  job: int
  part: Part  # For learners of one host.
  hosts: tuple[HostParts, ...]  # For learners of several hosts.


class PartTaken(FromShard):
  """Answer to `PullPart`: a lost fragment is here, but not installed."""

  job: int
  crcs: tuple[int, ...]  # CRCs of the pieces.


class Saved(FromShard):
  """Answer to a `SaveParts` that asked to wait for the disk."""

  job: int


# From the leader -------------------------------------------------------------


class FromLead(Value):
  """A message that the leader may send to a shard."""


class Accepted(FromLead):
  """Answer to a `ShardHello`; work begun for another leader is void."""


class Admit(SessionKey, FromLead):
  """A session of a learner has begun."""

  addresses: tuple[str, ...]  # Where the learner's processes offer this part.
  partition: str  # From the learner's hello.


class Release(SessionKey, FromLead):
  """A learner's session has ended."""


class PullPart(FromLead):
  """Pull the own part of an offer, or of a copy of a lost fragment."""

  job: int
  round: int
  learner: int
  incarnation: int
  fragment: int
  payload: Payload
  lost: bool = False  # It is a learner's copy of a fragment that is lost.


class CancelPart(FromLead):
  """The bytes of job `pull` are not wanted any more."""

  pull: int  # Job number of a `PullPart`.


class MergePart(FromLead):
  """Merge what these jobs pulled, by ascending learner; step, encode."""

  job: int
  round: int
  fragment: int
  pulls: tuple[int, ...]
  learners: tuple[int, ...]
  weights: tuple[float, ...]


class Recipient(SessionKey):
  """A session, with the handle under which it will find something."""

  handle: int


class InstallPart(FromLead):
  """Make the result of job `merge` the new Θ_p."""

  merge: int  # Job number of a `MergePart`.
  round: int
  fragment: int


class OfferPart(FromLead):
  """Offer an outer update, or the own part of the full fragment.

  Without recipients the latter is offered to the leader, under `job`.
  """

  job: int
  merge: int  # Job number of a `MergePart`; 0: the full fragment.
  fragment: int
  recipients: tuple[Recipient, ...]


class GoOn(FromLead):
  """Set Θ_p to `version`: from job `taken`, or from what is here."""

  fragment: int
  version: int
  taken: int  # Job number of a `PullPart`; 0: nothing was taken.


class RetireParts(SessionKey, FromLead):
  """The learner no longer needs these offers."""

  handles: tuple[int, ...]


class SaveParts(FromLead):
  """Write a checkpoint of everything as it is after this round."""

  job: int
  closed_round: int
  wait: bool  # Answer once it is on the disk.


class Depart(FromLead):
  """The run is over."""


FROM_SHARD = (messages.Alive, *FromShard.__subclasses__())
FROM_LEAD = (messages.Refusal, *FromLead.__subclasses__())
