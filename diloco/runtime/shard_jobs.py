# SPDX-License-Identifier: Apache-2.0
"""The orders that the lead has given to shards, and their answers."""

import dataclasses
from collections.abc import Callable, Mapping

from diloco.numerics import payload
from diloco.protocol import shard_messages as orders
from diloco.protocol import syncer_io
from diloco.protocol.messages import Part

# (round, learner, incarnation, handle): two offers of one learner for the
# same round differ only in the handle.
PullKey = tuple[int, int, int, int]
Answers = Mapping[int, object]  # By shard.


@dataclasses.dataclass(frozen=True)
class FromShard:
  """A shard's answer, on its way to the machine's thread."""

  shard: int
  answer: object  # One of shard_messages.FROM_SHARD.


@dataclasses.dataclass(frozen=True)
class ShardLost:
  """The stream of a shard's session has closed."""

  shard: int
  reason: str


@dataclasses.dataclass
class Job:
  """An order that was given to some shards."""

  fragment: int
  waiting: set[int]  # Shards that have not answered.
  done: Callable[[Answers], syncer_io.Event | None]
  failed: Callable[[orders.PartFailed], syncer_io.Event | None]
  given_up: Callable[[Answers], None] | None  # None: no caller waits for it.
  answers: dict[int, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Merged:
  """An outer step that all owners of the fragment have made."""

  job: int
  crcs: tuple[int, ...]  # Of the resulting pieces, in the layout's order.
  parts: tuple[Part, ...]  # Parts of the outer update, by shard.

  @property
  def crc(self) -> int:
    """CRC of the resulting Θ_p."""
    return payload.crc_of(self.crcs)
