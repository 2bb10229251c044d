# SPDX-License-Identifier: Apache-2.0
"""Messages between learners and syncer on the control plane.

They are plain frozen values without arrays: the bytes of fragments travel on
the data plane, and a `Payload` says how to request and verify them.
`diloco/transport/wire.py` derives its type checks from the field types here.
"""

import bisect
import dataclasses

from diloco.protocol.values import Value, field_names

PROTOCOL_VERSION = 7
# A peer may have written it; it goes in the event log.
REASON_CHARS_MAX = 1000
NO_BYTES = -1  # In place of a CRC: the process holds no bytes of Θ_p yet.


def brief(text: str) -> str:
  """Returns the text, cut to a length fit to send and log."""
  if len(text) <= REASON_CHARS_MAX:
    return text
  return text[: REASON_CHARS_MAX - 1] + '…'


class Part(Value):
  """The share of a payload between one process of a learner and one shard."""

  nbytes: int  # 0: there is nothing to pull.
  crc: int  # zlib.crc32 of the bytes.


class Payload(Value):
  """One offered array of bytes, as the receiver must find it.

  If it has parts, each is offered by a publisher of its own, all under one
  handle: part i = host·S + shard goes between process `host` of the learner and
  that shard of the syncer.
  """

  handle: int  # Unique within the offering process.
  codec: str  # Name of the codec that wrote it, such as 'int4'.
  nbytes: int  # Total of all parts.
  crc: int  # zlib.crc32 of the bytes, or of the parts' CRCs as u32s.
  parts: tuple[Part, ...] = ()  # Empty if there is only one.


class World(Value):
  """The slices of a learner that its process stands for.

  A slice is a group of hosts that fails together. A learner that has lost one,
  or has one back, re-forms: as a new process, with the rows of those it has.
  """

  slices: int = 1  # That take part,
  of: int = 1  # of so many.
  # What it holds is a boundary of its own, out of its slices' memory: nothing
  # is missing that a learner who reconnects would not miss, too.
  reformed: bool = False


class SessionKey(Value):
  """Names a session of a learner."""

  learner: int
  incarnation: int  # Rises with every process start and every session.


# From a learner ------------------------------------------------------------


class FromLearner(Value):
  """A message that a learner may send to the syncer."""


class Opening(Value):
  """The start of a stream; nothing else is accepted before it."""

  protocol: int
  run: str
  learner: int
  incarnation: int  # As in `SessionKey`.
  fingerprints: dict[str, str]  # Hashes of config, layout and data.


class Hello(Opening):
  """The first message of a session."""

  versions: tuple[int, ...]  # What the learner holds, per fragment.
  crcs: tuple[int, ...]  # CRCs of the bytes of those fragments, or `NO_BYTES`.
  began: bool  # This process has trained already: no bootstrap is needed.
  # Where the syncer pulls this learner's offers, by part.
  addresses: tuple[str, ...]
  # How several hosts share its parameters (`numerics.mesh_partition`); '': it
  # has one host. Learners with equal values can donate their state to each
  # other.
  partition: str = ''
  world: World = dataclasses.field(default=World())
  step: int = 0  # Own steps that its process goes on from, and
  rows: int = 0  # rows of its data shard taken by then.


class Inquiry(Opening):
  """Asks, before anything is compiled, if a hello would be refused for good.

  The syncer answers with a `Refusal`, or ends the stream. Its incarnation is
  that of session 0 of the process.
  """


class WantState(FromLearner):
  """A newcomer asks for a peer's copy of Θ and inner optimizer state."""

  reason: str


class StateOffered(SessionKey, FromLearner):
  """A donor offers the state that a newcomer's session wants.

  The syncer forwards it.
  """

  versions: tuple[int, ...]  # Versions of the fragments of Θ.
  crcs: tuple[int, ...]  # CRCs of their bytes.
  step: int  # The donor's own step, to which the inner state belongs.
  # The P fragments, then the inner state, each for every host of the newcomer;
  # in parts, by host, if the donor has several.
  payloads: tuple[Payload, ...]
  address: str  # Where host 0 of the donor, or its only one, offers them.
  other_addresses: tuple[str, ...] = ()  # Of its hosts 1, 2, ….
  partition: str = ''  # The donor's, as in its hello.


class StateTaken(FromLearner):
  """The newcomer has the donor's copy: the donor may serve another."""


class Ready(FromLearner):
  """Bootstrap is complete: from now on the learner counts."""

  steps_away: int  # Made since the last report to a syncer, at most s.
  source: str  # Origin of the inner state, for humans.


class Fetched(Value):
  """An update or fragment of the syncer's that the learner's host now holds."""

  handle: int  # Handle, which may be released.
  fragment: int
  version: int
  fetch_s: float  # From the announcement to the host's verified copy.
  held_s: float  # From then to the report.


class Report(FromLearner):
  """One finished inner step; also serves as the heartbeat."""

  step: int  # Inner steps of this process, 1 after the first.
  tokens: int  # Trained in this step.
  rows: int  # Of the learner's data shard, taken so far.
  step_s: float
  stall_s: float  # Of step_s, waiting for the exchange.
  loss: float
  fetched: tuple[Fetched, ...]  # Since the last report.
  # Time of all steps of this process, reported or not, without stalls.
  made_s: float = 0.0
  saved_step: int = 0  # Step of its newest complete checkpoint; 0: none.
  # Time to fetch an update, by the time between two; above 1 the link down is
  # too slow by that factor. 0: not known yet.
  link_load: float = 0.0


class Alive(FromLearner):
  """Sent by a learner that has no step to report: it waits or bootstraps."""


class Contribution(Value):
  """The facts of a copy of a fragment, from when it is made until it is merged.

  The learner's effect, its message, the syncer's share of a merge and the lines
  of both event logs all have these fields, from here. One that is added is
  `kw_only`, with a default for lines that are older.
  """

  base_version: int
  c_steps: int  # Inner steps since the learner last received the fragment.
  c_tokens: int  # Tokens since then.
  step: int  # The learner's own step at the copy.

  def facts(self, kind: type[Value]) -> dict[str, object]:
    """Returns the fields that a base of this class has, by name."""
    return {name: getattr(self, name) for name in field_names(kind)}


class _OfferKey(Value):
  round: int
  fragment: int


class OfferTerms(Contribution, _OfferKey):
  """A contribution, and the round and fragment that it is for."""


class Offer(OfferTerms, FromLearner):
  """A fragment at an inner-step boundary, relative to the learner's base."""

  payload: Payload


class WantFragment(FromLearner):
  """Asks for the full fragment: an update was missed or did not match.

  It is not answered while a full fragment is on its way already: another would
  withdraw that one before it is fetched.
  """

  fragment: int
  reason: str
  received: int = 0  # Full fragments of it that this session has brought.


class HandedIn(FromLearner):
  """Follows `Finish`: the learner's last offers have been sent."""

  last_round: int  # As `Finish` said; a syncer may have lost its ledger.


class Leaving(FromLearner):
  """No more steps will come; the last offer is made and may be merged."""


class FragmentHeld(FromLearner):
  """Answer to `AskFragment`: what the learner's host holds of Θ_p."""

  fragment: int
  version: int
  crc: int


class FragmentOffered(FromLearner):
  """A learner's copy of Θ_p in f32, for a syncer that has lost it."""

  fragment: int
  version: int
  payload: Payload
  crc: int  # CRC of the bytes of that Θ_p.


class NoFragment(FromLearner):
  """Answer to `DonateFragment`: no copy can be offered, or not now."""

  fragment: int
  reason: str


class Goodbye(FromLearner):
  """The learner leaves in good order."""

  reason: str


# From the syncer -----------------------------------------------------------


class FromSyncer(Value):
  """A message that the syncer may send to a learner."""


class Welcome(FromSyncer):
  """Answer to a `Hello` that was accepted."""

  step: int  # t, the global step.
  closed_round: int
  versions: tuple[int, ...]
  crcs: tuple[int, ...]  # CRCs of the bytes of each fragment of Θ.
  rows: int  # Taken of this learner id's data shard, as last reported.
  live: tuple[int, ...]
  clean: bool  # The learner was quarantined: its own state is not trusted.
  # Where this learner pulls the syncer's offers, by part; '' for a shard whose
  # address is not known yet.
  addresses: tuple[str, ...]


class ShardAt(FromSyncer):
  """A shard of the syncer has (re)started: where its offers are pulled."""

  shard: int
  addresses: tuple[str, ...]  # By process of the learner.


class Refusal(FromSyncer):
  """Answer to a `Hello` that was refused; the session ends."""

  reason: str
  final: bool  # Any other process of the learner would be refused as well.
  # The newest known incarnation, if this one was refused for being older;
  # otherwise −1.
  newest: int = -1


class Donate(SessionKey, FromSyncer):
  """Asks a live learner for its state, for a newcomer's session.

  It gives it once it has seen these versions.
  """

  versions: tuple[int, ...]
  partition: str = ''  # The newcomer's, as in its hello.


class DonationOver(SessionKey, FromSyncer):
  """The newcomer no longer needs the donor's offer."""


class StateAt(FromSyncer):
  """Answer to `WantState`: what a donor offered, and where."""

  donor: int
  incarnation: int  # The donor's incarnation.
  offered: StateOffered


class NoState(FromSyncer):
  """Answer to `WantState`: no donor is left."""

  reason: str


class AskFragment(FromSyncer):
  """Asks which version of Θ_p a learner holds, of one that this syncer lost."""

  fragment: int


class DonateFragment(FromSyncer):
  """Asks for Θ_p at a version that this syncer has lost."""

  fragment: int
  version: int


class Quarantine(FromSyncer):
  """Too many contributions were refused; only a clean bootstrap may return."""

  reason: str


class Update(FromSyncer):
  """Round `round` closed; the outer update of its fragment is offered."""

  round: int
  fragment: int
  version: int
  step: int  # t, the global step at the close.
  # The last own step that the receiver had reported by then; 0: none.
  reported_step: int
  participants: tuple[int, ...]  # In ascending id.
  weights: tuple[float, ...]  # Normalised; in the order of participants.
  incarnations: tuple[int, ...]  # Incarnations of the sessions of these offers.
  handles: tuple[int, ...]  # Handles of the offers themselves.
  # Age of each when merged, in its learner's steps.
  ages_steps: tuple[float, ...]
  payload: Payload
  crc: int  # CRC of the bytes of Θ_p at `version`.
  # CRC of each part's slice of Θ_p, if the learner has several hosts.
  part_crcs: tuple[int, ...] = ()

  def index_of(self, learner: int) -> int | None:
    """Returns a learner's place among the participants; None: it has none."""
    i = bisect.bisect_left(self.participants, learner)
    takes_part = self.participants[i : i + 1] == (learner,)
    return i if takes_part else None


class Skipped(FromSyncer):
  """Round `round` closed without a merge: its fragment's shard is away."""

  round: int
  step: int  # t, the global step at the close.
  reported_step: int  # As in `Update`.


class Postponed(FromSyncer):
  """Answer to `WantFragment`: it comes once its shard is back."""

  fragment: int


class FullFragment(FromSyncer):
  """The fragment itself, in f32, announced; it withdraws the one before."""

  fragment: int
  version: int
  payload: Payload
  crc: int
  # The receiver's last offer that the fragment includes; 0: none.
  merged_incarnation: int = 0
  merged_handle: int = 0
  part_crcs: tuple[int, ...] = ()  # As in `Update`.


class Retired(FromSyncer):
  """These offers of the learner will not be pulled (any more)."""

  handles: tuple[int, ...]
  pulled: bool  # Their bytes have arrived, and a round may merge them.


class OfferAgain(FromSyncer):
  """An offer could not be pulled; its round may still be open."""

  round: int
  reason: str


class Finish(FromSyncer):
  """Training is over: offer what is unmerged, for rounds up to this one."""

  step: int
  last_round: int


class Done(FromSyncer):
  """The last round closed; every learner leaves with exit code 0."""

  step: int
  closed_round: int


OPENING = tuple(Opening.__subclasses__())
FROM_LEARNER = (*OPENING, *FromLearner.__subclasses__())
FROM_SYNCER = tuple(FromSyncer.__subclasses__())
