# SPDX-License-Identifier: Apache-2.0
"""What learners and syncer say to each other on the control plane.

Plain frozen values, no arrays: bytes of fragments travel on the data plane,
and a `Payload` says how to ask for them and how to know them. Field types are
checked on the wire by `diloco/transport/wire.py`, which reads them from here.
"""

import dataclasses

PROTOCOL_VERSION = 4


@dataclasses.dataclass(frozen=True)
class Part:
  """What of a payload goes between one process of a learner and one shard."""

  nbytes: int  # 0: nothing, and it is not pulled.
  crc: int  # zlib.crc32 of the bytes.


@dataclasses.dataclass(frozen=True)
class Payload:
  """One offered array of bytes, as the receiver must find it.

  Where it has parts, each is offered at an outlet of its own, all under one
  handle: part i = host·S + shard is between process `host` of the learner and
  that shard of the syncer.
  """

  handle: int  # Unique within the offering process.
  codec: str  # Name of the codec that wrote it, such as 'int4'.
  nbytes: int  # Of all parts.
  crc: int  # zlib.crc32 of the bytes, or of the parts' CRCs as u32s.
  parts: tuple[Part, ...] = ()  # Empty where there is but one.


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
  crcs: tuple[int, ...]  # Of the bytes of those fragments.
  began: bool  # Its process has trained already: no bootstrap is to come.
  # Where the syncer pulls this learner's offers, by part.
  addresses: tuple[str, ...]
  # How several hosts share its parameters, `numerics.partition`; '': it has
  # one host. Learners that say the same here can give each other their state.
  partition: str = ''


@dataclasses.dataclass(frozen=True)
class WantState:
  """A newcomer asks for a peer's copy of Θ and inner optimizer state."""

  reason: str


@dataclasses.dataclass(frozen=True)
class StateOffered:
  """A donor offers what it was asked for; the syncer hands it on."""

  learner: int  # The newcomer, and its session.
  incarnation: int
  versions: tuple[int, ...]  # Of the fragments of Θ.
  crcs: tuple[int, ...]  # Of their bytes.
  step: int  # The donor's own step, whose inner state it is.
  # The P fragments, then the inner state; each in parts, by host, where the
  # donor has several.
  payloads: tuple[Payload, ...]
  address: str  # Where the newcomer pulls them; its host 0, of several.
  other_addresses: tuple[str, ...] = ()  # Where its hosts 1, 2, … do.


@dataclasses.dataclass(frozen=True)
class StateTaken:
  """The donor's copy is with the newcomer: it may serve another."""


@dataclasses.dataclass(frozen=True)
class Ready:
  """Bootstrap is complete: from now on the learner counts."""

  steps_away: int  # Made since the last report to a syncer, at most s.
  source: str  # Where the inner state is from, for people.


@dataclasses.dataclass(frozen=True)
class Fetched:
  """What of the syncer's is on the learner's host now."""

  handle: int  # It may be retired.
  fragment: int
  version: int
  fetch_s: float  # From the announcement to the host's proven copy.
  held_s: float  # From then to the report.


@dataclasses.dataclass(frozen=True)
class Report:
  """One finished inner step; also the heartbeat."""

  step: int  # Inner steps of this process, 1 after the first.
  tokens: int  # Trained in this step.
  position: int  # Index of the next batch of the learner's data shard.
  step_s: float
  stall_s: float  # Of step_s, waiting for the exchange.
  loss: float
  fetched: tuple[Fetched, ...]  # Since the last report.
  # Of all steps of this process, reported or not, without their stalls.
  made_s: float = 0.0
  saved_step: int = 0  # Of its newest whole checkpoint; 0: it has none.


@dataclasses.dataclass(frozen=True)
class Alive:
  """Sent by a learner that has no step to report: it waits, or it begins."""


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

  last_round: int  # As `Finish` said; a syncer may have lost its ledger.


@dataclasses.dataclass(frozen=True)
class Leaving:
  """No more steps will come; the last offer is there and may be merged."""


@dataclasses.dataclass(frozen=True)
class FragmentOffered:
  """A learner's copy of Θ_p in f32, for a syncer that has lost it."""

  fragment: int
  version: int
  payload: Payload
  crc: int  # Of the bytes of that Θ_p.


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
  clean: bool  # What the learner brings is not trusted: it was quarantined.
  # Where this learner pulls the syncer's offers, by part; '' where the shard
  # is still to say.
  addresses: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ShardAt:
  """A shard of the syncer is there (again): where its offers are pulled."""

  shard: int
  addresses: tuple[str, ...]  # By process of the learner.


@dataclasses.dataclass(frozen=True)
class Refusal:
  """Answer to a `Hello` that was not; the session ends."""

  reason: str
  final: bool  # Another process of the learner would be refused as well.
  # Because of which this one was: it has to be newer. −1: not the reason.
  newest: int = -1


@dataclasses.dataclass(frozen=True)
class Donate:
  """Asks a live learner for its state, once it has seen these versions."""

  learner: int  # The newcomer, and its session.
  incarnation: int
  versions: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DonationOver:
  """The newcomer needs the donor's offer no longer."""

  learner: int
  incarnation: int


@dataclasses.dataclass(frozen=True)
class StateAt:
  """Answer to `WantState`: what a donor offered, and where."""

  donor: int
  incarnation: int  # Of the donor.
  offered: StateOffered


@dataclasses.dataclass(frozen=True)
class NoState:
  """Answer to `WantState`: nobody is left who could donate."""

  reason: str


@dataclasses.dataclass(frozen=True)
class DonateFragment:
  """Asks for Θ_p at a version that this syncer has lost."""

  fragment: int
  version: int


@dataclasses.dataclass(frozen=True)
class Quarantine:
  """Too many contributions were refused; only a clean bootstrap may return."""

  reason: str


@dataclasses.dataclass(frozen=True)
class Update:
  """Round `round` closed; the outer update of its fragment is offered."""

  round: int
  fragment: int
  version: int
  step: int  # t, the global step at the close.
  # The last own step that the receiver had reported by then; 0: none.
  reported_step: int
  participants: tuple[int, ...]
  weights: tuple[float, ...]  # Normalised; in the order of participants.
  incarnations: tuple[int, ...]  # Of the sessions of these offers.
  handles: tuple[int, ...]  # Of the offers themselves.
  ages_steps: tuple[float, ...]  # How old they were, in their learner's steps.
  payload: Payload
  crc: int  # Of the bytes of Θ_p at `version`.
  # Of what each part is of, where the learner has several hosts.
  part_crcs: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Skipped:
  """Round `round` closed without a merge: the shard of its fragment is away."""

  round: int
  step: int  # t, the global step at the close.
  reported_step: int  # As in `Update`.


@dataclasses.dataclass(frozen=True)
class Postponed:
  """Answer to `WantFragment`: it comes once its shard is back."""

  fragment: int


@dataclasses.dataclass(frozen=True)
class FullFragment:
  """The fragment itself, in f32: the answer to `WantFragment`."""

  fragment: int
  version: int
  payload: Payload
  crc: int
  # The last offer of the receiver's that the fragment has merged; 0: none.
  merged_incarnation: int = 0
  merged_handle: int = 0
  part_crcs: tuple[int, ...] = ()  # As in `Update`.


@dataclasses.dataclass(frozen=True)
class Retired:
  """Offers of this learner that will not be pulled (again)."""

  handles: tuple[int, ...]
  pulled: bool  # Their bytes are there, and a round may merge them.


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
  Leaving,
  WantState,
  StateTaken,
  StateOffered,
  FragmentOffered,
  Goodbye,
)
FROM_SYNCER = (
  Welcome,
  ShardAt,
  Refusal,
  Donate,
  DonationOver,
  StateAt,
  NoState,
  DonateFragment,
  Quarantine,
  Update,
  Skipped,
  Postponed,
  FullFragment,
  Retired,
  OfferAgain,
  Finish,
  Done,
)
