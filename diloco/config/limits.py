# SPDX-License-Identifier: Apache-2.0
"""The bounds of one run's processes, all derived from M, P, S and the ids.

Sessions, threads and messages grow with the learners; what a run needs beyond
what one syncer serves is refused by its configuration, not at the session
after the last that fits. Imports nothing that a launcher does not have.
"""

import dataclasses
from collections.abc import Iterator

SESSIONS_MAX = 1024  # Of a syncer; each has two threads there.
SESSIONS_LEAST = 64
SPARE_SESSIONS = 16  # Of learners that are back while their old one ends.
MESSAGE_BYTES_MAX = 1 << 20  # As `transport.wire` has it; a test compares.
PULLS_PER_LEARNER = 4  # Side by side.
SHARES_BYTES = 48  # Of one learner in an `Update`, at most.
PART_BYTES = 32  # Of one part of a payload, and its CRC in an `Update`.
FRAGMENT_BYTES = 160  # Of one fragment in a `StateOffered`, at most.
MESSAGE_ROOM_BYTES = 1 << 14  # For all other fields of a message.


@dataclasses.dataclass(frozen=True)
class RunLimits:
  """Limits of a syncer of a run."""

  sessions: int
  pulls: int  # Concurrent pulls of one shard.
  workers: int  # Threads of a gRPC data plane that sends to all learners.
  hosts: int


def limits_of(learners: int, ids: int, shards: int) -> RunLimits:
  """The limits of a run.

  Args:
    ids: of learners that may join, `data.shards`; at least M.
  """
  wanted = ids + shards - 1 + SPARE_SESSIONS
  sessions = min(max(wanted, SESSIONS_LEAST), SESSIONS_MAX)
  update = MESSAGE_BYTES_MAX - MESSAGE_ROOM_BYTES - SHARES_BYTES * learners
  return RunLimits(
    sessions=sessions,
    pulls=PULLS_PER_LEARNER * learners,
    workers=sessions,
    hosts=max(0, update // (PART_BYTES * shards)),
  )


def broken_limits(learners: int, fragments: int, shards: int) -> Iterator[str]:
  """Yields 'key=value: the rule' for what no syncer serves."""
  most = SESSIONS_MAX - SPARE_SESSIONS - (shards - 1)
  if learners > most:
    yield (
      f'protocol.learners={learners}: a syncer of syncer.shards={shards} '
      f'serves at most {most}'
    )
  most = (MESSAGE_BYTES_MAX - MESSAGE_ROOM_BYTES) // FRAGMENT_BYTES
  if fragments > most:
    yield (
      f'protocol.fragments={fragments}: at most {most}, or what is said of all '
      'of them would not fit one message'
    )
