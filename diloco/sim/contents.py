# SPDX-License-Identifier: Apache-2.0
"""What simulated processes hold: here symbols for bytes, elsewhere arrays.

A cluster asks `Contents` for what a process holds besides its machine. With
`Symbols`, a fragment is a CRC that is a function of those before it: enough to
find an update that meets other bytes than it was made for. The lab has the
same with real arrays and real codecs (`diloco/lab/contents.py`).
"""

import dataclasses
import zlib
from typing import Any, Protocol

from diloco.protocol import learner_io, messages, syncer_io
from diloco.protocol.joining import Start

RUN = 'simulated'
FINGERPRINTS = {'config': 'c', 'layout': 'l', 'data': 'd'}


@dataclasses.dataclass(frozen=True)
class Carried(messages.Payload):
  """A payload with its bytes: nothing but a reference travels here."""

  data: Any = None
  order: Any = None  # Of the shard that offers it; see `simulated_shard`.


class Unusable(Exception):
  """A contribution that must not be merged."""


class LearnerContents(Protocol):
  """What a learner's process holds; lists are by fragment.

  Attributes:
    versions: of the host's copy of Θ.
    crcs: of its bytes.
    base_crcs: of the bytes that θ was last set to.
  """

  versions: list[int]
  crcs: list[int]
  base_crcs: list[int]

  def step(self, position: int, progress: int) -> float:
    """One inner step on the batch at `position`; the loss."""

  def snapshot(self, effect: learner_io.Snapshot) -> Any:
    """A copy of θ_p, of this boundary."""

  def offer(self, effect: learner_io.Snapshot, copy: Any) -> Any:
    """The bytes of that snapshot against its base."""

  def donate(self) -> Any:
    """The host's Θ and the inner state, of this boundary."""

  def adopt(self, offered: messages.StateOffered, donated: Any):
    """The host's Θ is a donor's from now on."""

  def adopt_inner(self):
    """The inner state is that of the last donation."""

  def reset_inner(self):
    """The inner state is a fresh one."""

  def update(self, p: int, version: int, data: Any, crc: int) -> str | None:
    """Takes in an outer update; why that can't be, if so."""

  def replace(self, p: int, version: int, data: Any, crc: int) -> str | None:
    """Takes in a whole fragment; why that can't be, if so."""

  def apply(self, effect: learner_io.Apply, training: bool):
    """θ_p takes in the host's Θ_p."""

  def fragment(self, p: int) -> Any:
    """The bytes of the host's Θ_p."""

  def save(self) -> Any:
    """All of it, as a checkpoint; nothing that happens later changes it."""


class SyncerContents(Protocol):
  """What the syncer's process holds; `crcs` are of Θ, by fragment."""

  crcs: list[int]

  def take(self, offer: messages.Offer) -> tuple[Any, float]:
    """A contribution and its norm; raises `Unusable`."""

  def merge(self, merge: syncer_io.Merge, taken: dict[int, Any]):
    """The outer step of a round; Θ is the new one from `publish` on."""

  def publish(self, p: int, version: int) -> Any:
    """Θ_p is at `version`; the bytes of the outer update."""

  def fragment(self, p: int) -> Any:
    """The bytes of Θ_p."""

  def take_fragment(self, p: int, version: int, data: Any, crc: int):
    """A learner's copy takes the place of a lost fragment."""

  def relabel(self, p: int, version: int):
    """Θ_p is at `version` from now on, whatever its bytes."""

  def save(self) -> Any:
    """All of it, as a checkpoint."""


class Contents(Protocol):
  """Makes them.

  Attributes:
    first_crcs: of the initial parameters, by fragment.
  """

  first_crcs: tuple[int, ...]

  def learner(
    self, learner: int, start: Start, saved: Any | None
  ) -> LearnerContents:
    """Of a process that starts; `saved`: by another one of this learner."""

  def syncer(self, crcs: tuple[int, ...], saved: Any | None) -> SyncerContents:
    """Of a process that starts; `saved` has these CRCs."""


class Symbols:
  """CRCs in place of bytes.

  Args:
    fragments: P.
  """

  def __init__(self, fragments: int):
    self.first_crcs = tuple(crc_of(p, 0) for p in range(fragments))

  def learner(self, learner: int, start: Start, saved: None):
    """See `Contents`."""
    return _LearnerSymbols(start)

  def syncer(self, crcs: tuple[int, ...], saved: None):
    """See `Contents`."""
    return _SyncerSymbols(crcs)


# (base_version, c_steps, c_tokens, step): they stand for an offer's bytes.
Counters = tuple[int, int, int, int]


def counters_of(
  snapshot: learner_io.Snapshot | messages.Offer | syncer_io.Share,
) -> Counters:
  """What of the bytes of a snapshot is known, or is said of them."""
  return (
    snapshot.base_version,
    snapshot.c_steps,
    snapshot.c_tokens,
    snapshot.step,
  )


class _LearnerSymbols:
  def __init__(self, start: Start):
    self.versions = list(start.versions)
    self.crcs = list(start.crcs)
    self.base_crcs = list(start.crcs)

  def step(self, position: int, progress: int) -> float:
    return 1.0

  def snapshot(self, effect: learner_io.Snapshot):
    return None

  def offer(self, effect: learner_io.Snapshot, copy: None) -> Counters:
    return counters_of(effect)

  def donate(self):
    return None

  def adopt(self, offered: messages.StateOffered, donated: None):
    self.versions = list(offered.versions)
    self.crcs = list(offered.crcs)

  def adopt_inner(self):
    pass

  def reset_inner(self):
    pass

  def update(self, p: int, version: int, data: None, crc: int) -> str | None:
    if self.versions[p] != version - 1:
      return f'host has version {self.versions[p]}'
    if crc_after(self.crcs[p], version) != crc:
      return f'another CRC at version {version}'
    return self.replace(p, version, data, crc)

  def replace(self, p: int, version: int, data: None, crc: int) -> str | None:
    self.versions[p], self.crcs[p] = version, crc
    return None

  def apply(self, effect: learner_io.Apply, training: bool):
    self.base_crcs[effect.fragment] = self.crcs[effect.fragment]

  def fragment(self, p: int):
    return None

  def save(self):
    return None


class _SyncerSymbols:
  def __init__(self, crcs: tuple[int, ...]):
    self.crcs = list(crcs)

  def take(self, offer: messages.Offer) -> tuple[Counters, float]:
    return offer.payload.data, offer.c_steps**0.5

  def merge(self, merge: syncer_io.Merge, taken: dict[int, Counters]):
    pass

  def publish(self, p: int, version: int):
    self.crcs[p] = crc_after(self.crcs[p], version)

  def fragment(self, p: int):
    return None

  def take_fragment(self, p: int, version: int, data: None, crc: int):
    self.crcs[p] = crc

  def relabel(self, p: int, version: int):
    pass

  def save(self):
    return None


def crc_of(fragment: int, version: int) -> int:
  """Stands for the bytes of Θ_p where nothing was ever lost."""
  crc = fragment
  for v in range(1, version + 1):
    crc = crc_after(crc, v)
  return crc


def crc_after(crc: int, version: int) -> int:
  """Stands for those after an outer update to `version`.

  A function of the bytes before, so that an update that meets other bytes
  than those it was made for is found out, as in a real run.
  """
  return zlib.crc32(f'{crc} {version}'.encode())
