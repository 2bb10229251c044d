# SPDX-License-Identifier: Apache-2.0
"""Messages between the processes of one learner.

Only host 0, the *leading host*, speaks with the syncer. The others repeat at
the same boundary what it does, so that all hosts run the same programs in the
same order on the learner's devices; each host moves its own part of the bytes.
An order about bytes has a job number, under which every host answers. That of
an offer is its handle, of a donation its first one.
"""

from diloco.protocol.messages import Part, Payload, SessionKey
from diloco.protocol.values import Value

# A file in the folder of a learner's --memory: its world is to end at the next
# boundary, as another slice is to take part.
WANTED = 'wanted'


def alive_file(slice_id: int, host: int) -> str:
  """Returns the name of a file there, which that host of a slice touches."""
  return f'slice-{slice_id}.host-{host}.alive'


class FromLeadingHost(Value):
  """A message that the leading host may send to the others."""


class JaxAt(FromLeadingHost):
  """All hosts are here; gives the address of JAX's coordination service."""

  address: str


# For the loop of the others: in order, at boundaries --------------------------


class MakeStep(FromLeadingHost):
  """Dispatch one inner step."""

  rows: int  # Number of its batch's first row.
  lr: float
  # Of a learner of several slices: what belongs to this boundary, JSON, as of
  # `learner.restore.progress_of`.
  progress: str = ''


class Proceed(FromLeadingHost):
  """All of this boundary is told: make a step of a loop that is not ours."""

  rows: int  # Taken of the learner's data.
  step: int  # Own steps made.
  global_step: int  # t.


class TakeSnapshot(FromLeadingHost):
  """Copy a fragment; offer this host's part of it, if there is a session."""

  fragment: int
  session: int  # 0: there is no session, so nothing is offered.
  handle: int
  keep: tuple[int, ...]  # See `learner.events.Snapshot`.


class ApplyFragment(FromLeadingHost):
  """Blend in the update, or overwrite before the first step."""

  fragment: int
  version: int
  blended: bool
  carry: bool  # For the other fields see `learner.events.Apply`.
  handle: int
  keep: tuple[int, ...]


class DrawTheta(FromLeadingHost):
  """Draw the initial Θ, with a fresh inner state."""


class ResetState(FromLeadingHost):
  """Reset the inner optimizer state to its initial value."""


class DonateAt(SessionKey, FromLeadingHost):
  """Copy Θ and inner state at this boundary, and offer them to a newcomer."""

  handles: tuple[int, ...]  # Enough for the host that needs most.
  partition: str  # The newcomer's.


class AdoptState(FromLeadingHost):
  """Replace the inner state by the donor's, which this host has fetched."""


class BeginAt(FromLeadingHost):
  """Training begins at this row of the data shard."""

  rows: int


class SaveAt(FromLeadingHost):
  """Begin a checkpoint of this boundary."""

  step: int
  progress: str  # JSON, as of `learner.restore.progress_of`.


class Reform(FromLeadingHost):
  """Write this boundary to memory, and end: other slices are to take part."""

  job: int
  progress: str  # As of `MakeStep`.


class EndAt(FromLeadingHost):
  """The process ends with this exit code."""

  code: int
  reason: str


# For the threads of the others ------------------------------------------------


class RestoreFrom(FromLeadingHost):
  """Resume from this checkpoint or boundary, on all hosts."""

  step: int  # Of the checkpoint, or boundary; −1 means none.
  # Slice whose memory has that boundary: its number in this world; −1: it is a
  # checkpoint.
  slice: int = -1
  everywhere: bool = False  # All other slices have it, too.
  progress: str = ''  # What belongs to the boundary.


class OpenSession(FromLeadingHost):
  """A new session with the syncer has begun: say where this host offers."""

  job: int
  session: int


class SyncerAt(FromLeadingHost):
  """Tells the hosts where they pull what the syncer offers to them."""

  session: int
  addresses: tuple[str, ...]  # By host and shard of the syncer.


class ShardMoved(FromLeadingHost):
  """A shard of the syncer has restarted and offers at these addresses now."""

  session: int
  shard: int
  addresses: tuple[str, ...]  # By host.


class CloseSession(FromLeadingHost):
  """The session has ended, and with it all that was offered in it."""

  session: int


class HostRetire(FromLeadingHost):
  """These offers will not be pulled (any more)."""

  session: int
  handles: tuple[int, ...]


class OfferHeld(FromLeadingHost):
  """Offer this host's part of Θ_p to a syncer that has lost it."""

  session: int
  fragment: int
  handle: int


class HostTake(FromLeadingHost):
  """Pull and verify this host's part of an update or of a full fragment."""

  job: int
  session: int
  fragment: int
  version: int
  full: bool
  payload: Payload  # In parts, by host and shard of the syncer.
  crc: int  # Of the whole Θ_p.
  part_crcs: tuple[int, ...]  # CRCs of slices of Θ_p, by host and shard.


class HostFetch(FromLeadingHost):
  """Pull and verify this host's boxes of a donor's state; adopt it later."""

  job: int
  addresses: tuple[str, ...]  # Of the donor's hosts.
  payloads: tuple[Payload, ...]  # As in `messages.StateOffered`.
  partition: str  # The donor's.
  versions: tuple[int, ...]
  crcs: tuple[int, ...]  # CRCs of the whole fragments.


class ReadSaved(FromLeadingHost):
  """Read this host's boxes of a peer's checkpoint; adopt them later."""

  job: int
  learner: int
  step: int


class FetchOver(FromLeadingHost):
  """All hosts have fetched their parts: adopt them, or discard them."""

  job: int
  taken: bool


class EndDonations(FromLeadingHost):
  """Withdraw what this host offers to a newcomer."""

  newcomer: tuple[int, ...]  # Learner and incarnation; empty: all newcomers.


# From the other hosts ---------------------------------------------------------


class FromOtherHost(Value):
  """A message that another host may send to the leading one."""


class HostHere(FromOtherHost):
  """A host's first message, once authenticated; JAX is yet to be started."""

  host: int  # The host number that the launcher gave.


class HostStarted(FromOtherHost):
  """A host has compiled: its index in JAX, and the checkpoints that it sees."""

  host: int
  steps: tuple[int, ...]
  held_step: int = 0  # Of the boundary in its memory; 0: there is none.
  progress: str = ''  # What belongs to that.


class HostDone(FromOtherHost):
  """Answer to an order about bytes: this host's part is done, or failed."""

  job: int
  reason: str = ''  # Why it failed; empty if it did not.
  # Where it is pulled: a session's offers, by shard of the syncer, or a
  # donation.
  addresses: tuple[str, ...] = ()
  # What is on offer: an offer's by shard; of a donation the P fragments, then
  # the inner state.
  parts: tuple[Part, ...] = ()


class HostSaved(FromOtherHost):
  """This host's save of a step is over, whether it was completed or not."""

  step: int


class StopWanted(FromOtherHost):
  """This host was told to stop: the learner has to leave in good order."""


FROM_LEADING_HOST = tuple(FromLeadingHost.__subclasses__())
FROM_OTHER_HOSTS = tuple(FromOtherHost.__subclasses__())
