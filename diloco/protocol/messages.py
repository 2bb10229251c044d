# SPDX-License-Identifier: Apache-2.0
"""What learners and syncer say to each other on the control plane.

Plain frozen values, no arrays: bytes of fragments travel on the data plane,
and a `Payload` says how to ask for them and how to know them. Field types are
checked on the wire by `diloco/transport/wire.py`, which reads them from here.
"""

import dataclasses

PROTOCOL_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Payload:
  """One offered array of bytes, as the receiver must find it."""

  handle: int  # Unique within the offering process.
  codec: str  # Name of the codec that wrote it, such as 'int4'.
  nbytes: int
  crc: int  # zlib.crc32 of the bytes.


# From a learner ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hello:
  """The first message of a session; nothing else is heard before it."""

  protocol: int
  run: str
  learner: int
  incarnation: int  # Rises with every process start and every session.
  fingerprints: dict[str, str]  # config, layout, data.
  versions: tuple[int, ...]  # What the learner holds, per fragment.
  address: str  # Where the syncer pulls this learner's offers.


@dataclasses.dataclass(frozen=True)
class Ready:
  """Bootstrap is complete: from now on the learner counts."""


@dataclasses.dataclass(frozen=True)
class Report:
  """One finished inner step; also the heartbeat."""

  step: int  # Inner steps of this process, 1 after the first.
  tokens: int  # Trained in this step.
  position: int  # Index of the next batch of the learner's data shard.
  step_s: float
  stall_s: float  # Of step_s, waiting for the exchange.
  loss: float
  fetched: tuple[int, ...]  # Handles of the syncer that may be retired.


@dataclasses.dataclass(frozen=True)
class Alive:
  """Sent by a learner that waits (τ = 0) and has no step to report."""


@dataclasses.dataclass(frozen=True)
class Offer:
  """A fragment at an inner-step boundary, relative to the learner's base."""

  round: int
  fragment: int
  base_version: int
  c_steps: int  # Inner steps since the learner last received the fragment.
  c_tokens: int  # Tokens likewise.
  step: int
  payload: Payload


@dataclasses.dataclass(frozen=True)
class WantFragment:
  """Asks for the full fragment: an update was missed or did not match."""

  fragment: int
  reason: str


@dataclasses.dataclass(frozen=True)
class HandedIn:
  """After `Finish`: the learner's last offers have been sent."""


@dataclasses.dataclass(frozen=True)
class Goodbye:
  """The learner leaves in good order."""

  reason: str


# From the syncer -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Welcome:
  """Answer to a `Hello` that was accepted."""

  step: int  # t, the global step.
  closed_round: int
  versions: tuple[int, ...]
  crcs: tuple[int, ...]  # Of the bytes of each fragment of Θ.
  position: int  # Next batch of this learner id's shard, as last reported.
  live: tuple[int, ...]
  address: str  # Where this learner pulls the syncer's offers.


@dataclasses.dataclass(frozen=True)
class Refusal:
  """Answer to a `Hello` that was not; the session ends."""

  reason: str
  final: bool  # Another process of the learner would be refused as well.


@dataclasses.dataclass(frozen=True)
class Update:
  """Round `round` closed; the outer update of its fragment is offered."""

  round: int
  fragment: int
  version: int
  step: int  # t, the global step at the close.
  participants: tuple[int, ...]
  weights: tuple[float, ...]  # Normalised; in the order of participants.
  ages_s: tuple[float, ...]  # How long each merged offer had waited.
  payload: Payload
  crc: int  # Of the bytes of Θ_p at `version`.


@dataclasses.dataclass(frozen=True)
class FullFragment:
  """The fragment itself, in f32: the answer to `WantFragment`."""

  fragment: int
  version: int
  payload: Payload
  crc: int


@dataclasses.dataclass(frozen=True)
class Retired:
  """Offers of this learner that will not be pulled (again)."""

  handles: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class OfferAgain:
  """An offer could not be pulled; its round may still be open."""

  round: int
  reason: str


@dataclasses.dataclass(frozen=True)
class Finish:
  """Training is over: offer what is unmerged, for rounds up to this one."""

  step: int
  last_round: int


@dataclasses.dataclass(frozen=True)
class Done:
  """The last round closed; everyone leaves with exit code 0."""

  step: int
  closed_round: int


FROM_LEARNER = (
  Hello,
  Ready,
  Report,
  Alive,
  Offer,
  WantFragment,
  HandedIn,
  Goodbye,
)
FROM_SYNCER = (
  Welcome,
  Refusal,
  Update,
  FullFragment,
  Retired,
  OfferAgain,
  Finish,
  Done,
)
