# SPDX-License-Identifier: Apache-2.0
"""The contents of simulated processes: symbols here, arrays in the lab.

A cluster asks `Backend` for what a process holds besides its machine. Here a
fragment is a CRC that is a function of those before it: enough to detect an
update that is applied to other bytes than it was made for. The lab has classes
of the same methods with real arrays (`diloco/lab/process_arrays.py`).
"""

import zlib
from typing import Any

from diloco.protocol import messages
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner.bootstrap import Start
from diloco.protocol.syncer import events as syncer_events

RUN = 'simulated'
FINGERPRINTS = {'config': 'c', 'layout': 'l', 'data': 'd'}


class Carried(messages.Payload):
  """A payload with its bytes, which are passed by reference."""

  data: Any = None
  order: Any = None  # Returns False once the shard that offers it is dead.


class RefusedContribution(Exception):
  """A contribution that must not be merged."""


# (base_version, c_steps, c_tokens, step), in place of an offer's bytes.
Counters = tuple[int, int, int, int]


def counters_of(
  snapshot: learner_events.Snapshot | messages.Offer | syncer_events.Share,
) -> Counters:
  """Returns the counters that stand for the bytes of a snapshot."""
  return (
    snapshot.base_version,
    snapshot.c_steps,
    snapshot.c_tokens,
    snapshot.step,
  )


class LearnerBackend:
  """The contents of a learner's process, here symbols; lists are by fragment.

  Attributes:
    versions: versions of the host's copy of Θ.
    crcs: CRCs of its bytes.
    base_crcs: CRCs of the bytes that θ was last set to.
  """

  def __init__(self, start: Start):
    self.versions = list(start.versions)
    self.crcs = list(start.crcs)
    self.base_crcs = list(start.crcs)

  def step(self, rows: int, progress: int) -> float:
    """Makes an inner step on the batch that begins there; returns the loss."""
    return 1.0

  def snapshot(self, effect: learner_events.Snapshot) -> Any:
    """Returns a copy of θ_p at this boundary."""

  def offer(self, effect: learner_events.Snapshot, copy: Any) -> Any:
    """Returns the bytes of that snapshot against its base."""
    return counters_of(effect)

  def donate(self) -> Any:
    """Returns the host's Θ and the inner state at this boundary."""

  def adopt(self, offered: messages.StateOffered, donated: Any):
    """Replaces the host's Θ by a donor's."""
    self.versions = list(offered.versions)
    self.crcs = list(offered.crcs)

  def adopt_inner(self):
    """Replaces the inner state by that of the last donation."""

  def reset_inner(self):
    """Resets the inner state."""

  def update(self, p: int, version: int, data: Any, crc: int) -> str | None:
    """Takes in an outer update; returns why it could not, if so."""
    if self.versions[p] != version - 1:
      return f'host has version {self.versions[p]}'
    if crc_after(self.crcs[p], version) != crc:
      return f'another CRC at version {version}'
    return self.replace(p, version, data, crc)

  def replace(self, p: int, version: int, data: Any, crc: int) -> str | None:
    """Takes in a whole fragment; returns why it could not, if so."""
    self.versions[p], self.crcs[p] = version, crc
    return None

  def apply(self, effect: learner_events.Apply, training: bool):
    """Takes the host's Θ_p into θ_p."""
    self.base_crcs[effect.fragment] = self.crcs[effect.fragment]

  def fragment(self, p: int) -> Any:
    """Returns the bytes of the host's Θ_p."""

  def save(self) -> Any:
    """Returns all of it as a checkpoint, which later changes do not affect."""


class SyncerBackend:
  """The contents of the syncer's process, here symbols.

  Attributes:
    crcs: CRCs of Θ, by fragment.
  """

  def __init__(self, crcs: tuple[int, ...]):
    self.crcs = list(crcs)

  def take(self, offer: messages.Offer) -> tuple[Any, float]:
    """Returns a contribution and its norm; raises `RefusedContribution`."""
    return offer.payload.data, offer.c_steps**0.5

  def merge(self, merge: syncer_events.Merge, taken: dict[int, Any]):
    """Makes the outer step of a round; Θ is the new one from `publish` on."""

  def publish(self, p: int, version: int) -> Any:
    """Sets Θ_p to `version`; returns the bytes of the outer update."""
    self.crcs[p] = crc_after(self.crcs[p], version)

  def fragment(self, p: int) -> Any:
    """Returns the bytes of Θ_p."""

  def take_fragment(self, p: int, version: int, data: Any, crc: int):
    """Replaces a lost fragment by a learner's copy."""
    self.crcs[p] = crc

  def relabel(self, p: int, version: int):
    """Sets Θ_p to `version`, whatever its bytes."""

  def save(self) -> Any:
    """Returns all of it as a checkpoint."""


class Backend:
  """Makes the contents of processes, here symbols.

  Attributes:
    first_crcs: CRCs of the initial parameters, by fragment.

  Args:
    fragments: P.
  """

  def __init__(self, fragments: int):
    self.first_crcs = tuple(crc_of(p, 0) for p in range(fragments))

  def learner(
    self, learner: int, start: Start, saved: Any | None
  ) -> LearnerBackend:
    """Makes those of a learner's process; `saved` is its last checkpoint."""
    return LearnerBackend(start)

  def syncer(self, crcs: tuple[int, ...], saved: Any | None) -> SyncerBackend:
    """Makes those of a syncer's process; `saved` has these CRCs."""
    return SyncerBackend(crcs)


def crc_of(fragment: int, version: int) -> int:
  """Returns the CRC of Θ_p at a version if nothing was ever lost."""
  crc = fragment
  for v in range(1, version + 1):
    crc = crc_after(crc, v)
  return crc


def crc_after(crc: int, version: int) -> int:
  """Returns the CRC after an outer update to `version`.

  It is a function of the CRC before, so that an update applied to other bytes
  than those it was made for is detected, as in a real run.
  """
  return zlib.crc32(f'{crc} {version}'.encode())
