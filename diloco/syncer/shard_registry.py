# SPDX-License-Identifier: Apache-2.0
"""The shards that are connected, what they hold, and their jobs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from diloco.config import run_config
from diloco.numerics import payload
from diloco.numerics.codec import Codec
from diloco.numerics.shard_assignment import ShardAssignment
from diloco.protocol import messages
from diloco.protocol import shard_messages as orders
from diloco.protocol.messages import Part
from diloco.protocol.syncer import events as syncer_events
from diloco.run.spec import RunSpec
from diloco.syncer.shard import Shard
from diloco.transport.control_server import ControlSession

UNKNOWN = (-1, 0)  # A version and a CRC that no fragment has.
# (round, learner, incarnation, handle): two offers of one learner for the
# same round differ only in the handle.
PullKey = tuple[int, int, int, int]
Answers = Mapping[int, object]  # By shard.
NOTHING = Part(0, 0)


@dataclasses.dataclass
class RemoteShard:
  """A shard in another process, while it has a session."""

  session: ControlSession
  process: int
  address: str  # Where the lead pulls what it collects from the shard.
  heard_s: float
  # By fragment: version and piece CRCs that it holds, and those to which its
  # outer state belongs.
  held: dict[int, tuple[int, tuple[int, ...]]]
  outer: dict[int, tuple[int, tuple[int, ...]]]


class ShardRegistry:
  """The shards of one syncer, as its lead sees them.

  Args:
    versions: version of every fragment, as far as the ledger knows.

  Attributes:
    remote: the other shards that have a session, by number.
    run: version and CRC that the run has of each fragment.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    lead: Shard,
    versions: Sequence[int],
    crcs: Sequence[int | None],
  ):
    self._run_spec = run_spec
    self._owners = run_spec.owners
    self._lead = lead
    self.remote: dict[int, RemoteShard] = {}
    self.run = list(zip(versions, crcs))

  @property
  def elsewhere(self) -> tuple[int, ...]:
    """The fragments of which other shards than the lead own a piece."""
    fragments = range(len(self.run))
    return tuple(p for p in fragments if not self._is_here(p))

  def crcs(self) -> tuple[int, ...]:
    """Returns the CRC of every fragment's bytes, as the run has them."""
    here = self._lead.model.crcs()
    return tuple(
      here[p] if self._is_here(p) else crc
      for p, (_, crc) in enumerate(self.run)
    )

  def versions(self) -> tuple[int, ...]:
    """Returns the version of every fragment, as the run has it."""
    here = self._lead.model.versions()
    return tuple(
      here[p] if self._is_here(p) else version
      for p, (version, _) in enumerate(self.run)
    )

  def outer(self, fragment: int) -> tuple[int, int]:
    """Returns version and CRC to which a fragment's outer state belongs.

    It is `UNKNOWN` if its shards do not agree, or one of them is not here.
    """
    owners = self._owners.of_fragment(fragment)
    if not self.is_whole(fragment):
      return UNKNOWN
    found = {
      s: self.remote[s].outer[fragment]
      if s
      else self._lead.model.outer_of(fragment)
      for s in owners
    }
    versions = {version for version, _ in found.values()}
    if len(versions) > 1:
      return UNKNOWN
    crcs = self.compose(fragment, {s: crcs for s, (_, crcs) in found.items()})
    return versions.pop(), payload.crc_of(crcs)

  def session_of(self, shard: int) -> ControlSession | None:
    """Returns the session whose messages count for a shard."""
    remote = self.remote.get(shard)
    return remote and remote.session

  def excuse_silence(self, away_s: float):
    """Extends the silence limits by the time this process was suspended."""
    for remote in self.remote.values():
      remote.heard_s += away_s

  def silent(self, since_s: float) -> list[int]:
    """Returns the shards that were silent since then."""
    return [s for s, x in self.remote.items() if x.heard_s < since_s]

  def why_refused(self, hello: orders.ShardHello) -> str | None:
    """Returns why a shard is refused; None if it is accepted."""
    config = self._run_spec.config
    if hello.protocol != messages.PROTOCOL_VERSION:
      return f'protocol {hello.protocol}, not {messages.PROTOCOL_VERSION}'
    if hello.run != config.name:
      return f'run {hello.run!r}, this lead serves {config.name!r}'
    if not 0 < hello.shard < self._owners.shards:
      return f'shard {hello.shard}: must be in 1 … {self._owners.shards - 1}'
    differing = run_config.differences(
      self._run_spec.fingerprints, hello.fingerprints
    )
    if differing:
      return f'another configuration: {differing}'
    pieces = tuple(
      len(self._owners.pieces(p, hello.shard))
      for p in self._owners.of_shard(hello.shard)
    )
    said = (hello.versions, hello.crcs, hello.outer_versions, hello.outer_crcs)
    if (
      hello.fragments != self._owners.of_shard(hello.shard)
      or any(len(each) != len(pieces) for each in said)
      or tuple(len(each) for each in hello.crcs) != pieces
      or tuple(len(each) for each in hello.outer_crcs) != pieces
    ):
      return f'shard {hello.shard} speaks of other pieces than it owns'
    older = self.remote.get(hello.shard)
    if older is not None and older.process > hello.process:
      return f'shard {hello.shard} has a newer process than this'
    return None

  def is_whole(self, fragment: int) -> bool:
    """Returns True if all shards that own a piece of the fragment are here."""
    owners = self._owners.of_fragment(fragment)
    return all(not s or s in self.remote for s in owners)

  def held(self, p: int, believed: bool) -> syncer_events.Held:
    """Returns what the shards hold of a fragment, once all are here.

    Args:
      believed: a version newer than the ledger's is taken as the run's.
    """
    found = {s: self.part_held(s, p) for s in self._owners.of_fragment(p)}
    versions = {version for version, _ in found.values()}
    version, crc = self.run[p]
    if max(versions) > version and not believed:
      return syncer_events.Held(p, max(versions), crc, same=False)
    least = min(versions)
    same = True
    if len(versions) == 1:
      crcs = {s: crcs for s, (_, crcs) in found.items()}
      here = payload.crc_of(self.compose(p, crcs))
      same = least != version or crc in (None, here)
      # The ledger was lost: it does not know the version, or not its bytes.
      if least > version or (least == version and crc is None):
        self.run[p] = least, here
    return syncer_events.Held(p, least, crc if least <= version else None, same)

  def part_held(self, shard: int, p: int) -> tuple[int, tuple[int, ...]]:
    if shard:
      return self.remote[shard].held[p]
    model = self._lead.model
    return model.versions()[p], model.piece_crcs(p)

  def _is_here(self, fragment: int) -> bool:
    return self._owners.of_fragment(fragment) == (0,)

  def crcs_of(
    self, shard: int, fragment: int, crcs: Sequence[int]
  ) -> tuple[int, ...]:
    """Returns the CRCs of a shard's own pieces, from those of all pieces."""
    pairs = zip(crcs, self._owners.of[fragment])
    return tuple(crc for crc, owner in pairs if owner == shard)

  def compose(
    self, fragment: int, crcs: Mapping[int, Sequence[int]]
  ) -> tuple[int, ...]:
    """Returns the CRCs of a fragment's pieces in order, from those by shard."""
    left = {shard: iter(each) for shard, each in crcs.items()}
    return tuple(next(left[owner]) for owner in self._owners.of[fragment])


@dataclasses.dataclass(frozen=True)
class ShardAnswer:
  """A shard's answer, on its way to the machine's thread."""

  shard: int
  answer: object  # One of shard_messages.FROM_SHARD.


@dataclasses.dataclass(frozen=True)
class ShardLost:
  """The stream of a shard's session has closed."""

  shard: int
  reason: str


@dataclasses.dataclass
class ShardRequest:
  """An order that was given to some shards."""

  fragment: int
  waiting: set[int]  # Shards that have not answered.
  done: Callable[[Answers], syncer_events.Event | None]
  failed: Callable[[orders.PartFailed], syncer_events.Event | None]
  given_up: Callable[[Answers], None] | None  # None: no caller waits for it.
  answers: dict[int, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class CompletedOuterStep:
  """An outer step that all owners of the fragment have made."""

  job: int
  crcs: tuple[int, ...]  # Of the resulting pieces, in the layout's order.
  parts: tuple[Part, ...]  # Parts of the outer update, by shard.

  @property
  def crc(self) -> int:
    """CRC of the resulting Θ_p."""
    return payload.crc_of(self.crcs)


def never(answer: orders.PartFailed):
  raise AssertionError(f'no answer to what was ordered: {answer}')


def by_part(
  owners: ShardAssignment,
  to: orders.Recipient,
  answers: Answers,
  whole: tuple[Part, ...],
) -> tuple[tuple[Part, ...], tuple[int, ...]]:
  """Returns the parts for one session, and the CRCs of its hosts' slices.

  Args:
    answers: `PartOffered` by shard.
    whole: by shard, for a learner of one host.
  """
  found = {
    shard: each
    for shard, answer in answers.items()
    for each in answer.hosts
    if (each.learner, each.incarnation) == (to.learner, to.incarnation)
  }
  if not found:
    return whole, ()
  shards = range(owners.shards)
  hosts = range(len(next(iter(found.values())).parts))
  pairs = [
    (found[s].parts[h], found[s].crcs[h]) if s in found else (NOTHING, 0)
    for h in hosts
    for s in shards
  ]
  return tuple(part for part, _ in pairs), tuple(crc for _, crc in pairs)


def by_shard(
  owners: ShardAssignment, parts: Mapping[int, Part]
) -> tuple[Part, ...]:
  shards = range(owners.shards)
  return tuple(parts.get(shard, NOTHING) for shard in shards)


def admission(
  owners: ShardAssignment,
  shard: int,
  key: tuple[int, int],
  addresses: Sequence[str],
  partition: str,
) -> orders.Admit:
  own = tuple(addresses[shard :: owners.shards])
  return orders.Admit(*key, own, partition)


def expected_parts(
  owners: ShardAssignment, fragment: int, codec: Codec, answers: Answers
) -> dict[int, Part]:
  """Returns the answered parts, and the expected sizes of the others."""
  parts = {s: answer.part for s, answer in answers.items()}
  for s in owners.of_fragment(fragment):
    nbytes = payload.payload_bytes(owners.pieces(fragment, s), codec)
    parts.setdefault(s, Part(nbytes, 0))
  return parts
