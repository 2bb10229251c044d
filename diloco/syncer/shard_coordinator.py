# SPDX-License-Identifier: Apache-2.0
"""All shards as one: turns the machine's effects into orders to shards.

Each effect that moves bytes is a *job*: an order to every shard that owns a
piece of the fragment, and a continuation for when all have answered. Only the
machine's thread uses this module.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from absl import logging

from diloco.config import run_config
from diloco.numerics import payload
from diloco.protocol import messages
from diloco.protocol import shard_messages as orders
from diloco.protocol.messages import Part, Payload
from diloco.protocol.syncer import events
from diloco.protocol.syncer.machine import Syncer
from diloco.run.payload_parts import announced_parts
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
  done: Callable[[Answers], events.Event | None]
  failed: Callable[[orders.PartFailed], events.Event | None]
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


def _never(answer: orders.PartFailed):
  raise AssertionError(f'no answer to what was ordered: {answer}')


class ShardCoordinator:
  """The shards of one syncer, as its lead, shard 0, sees them.

  Args:
    versions: version of every fragment, as far as the ledger knows.
    crcs: CRCs of their bytes; None: unknown.
    say: sends a message to a session of a learner, in its order.

  Attributes:
    remote: the other shards that have a session, by number.
    run: version and CRC that the run has of each fragment.
    unsaved: shards that are writing their last checkpoint.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    lead: Shard,
    versions: Sequence[int],
    crcs: Sequence[int | None],
    say: Callable[[tuple[int, int], object], None],
  ):
    self._run_spec = run_spec
    self._owners = run_spec.owners
    self._lead = lead
    self.remote: dict[int, RemoteShard] = {}
    self.run = list(zip(versions, crcs))
    self._say = say
    self.unsaved: set[int] = set()
    # By session: its addresses, and how its hosts cut a fragment.
    self._addresses: dict[tuple[int, int], tuple[tuple[str, ...], str]] = {}
    # Unique across leads, since a shard outlives its lead.
    self._numbers = itertools.count(time.time_ns() // 1000)
    self._handles = itertools.count(1)
    self._jobs: dict[int, ShardRequest] = {}
    # Jobs of pulls in progress, and of pulls that are done.
    self._pulling: dict[PullKey, int] = {}
    self._pulled: dict[PullKey, int] = {}
    self._merged: dict[int, CompletedOuterStep] = {}  # By round.
    # Job, and CRCs of pieces by shard.
    self._taken: dict[tuple[int, tuple[int, int]], tuple[int, dict]] = {}

  # What the shards hold -----------------------------------------------------

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

  def held(self, p: int, believed: bool) -> events.Held:
    """Returns what the shards hold of a fragment, once all are here.

    Args:
      believed: a version newer than the ledger's is taken as the run's.
    """
    found = {s: self.part_held(s, p) for s in self._owners.of_fragment(p)}
    versions = {version for version, _ in found.values()}
    version, crc = self.run[p]
    if max(versions) > version and not believed:
      return events.Held(p, max(versions), crc, same=False)
    least = min(versions)
    same = True
    if len(versions) == 1:
      crcs = {s: crcs for s, (_, crcs) in found.items()}
      here = payload.crc_of(self.compose(p, crcs))
      same = least != version or crc in (None, here)
      # The ledger was lost: it does not know the version, or not its bytes.
      if least > version or (least == version and crc is None):
        self.run[p] = least, here
    return events.Held(p, least, crc if least <= version else None, same)

  def part_held(self, shard: int, p: int) -> tuple[int, tuple[int, ...]]:
    if shard:
      return self.remote[shard].held[p]
    model = self._lead.model
    return model.versions()[p], model.piece_crcs(p)

  def _is_here(self, fragment: int) -> bool:
    return self._owners.of_fragment(fragment) == (0,)

  def compose(
    self, fragment: int, crcs: Mapping[int, Sequence[int]]
  ) -> tuple[int, ...]:
    """Returns the CRCs of a fragment's pieces in order, from those by shard."""
    left = {shard: iter(each) for shard, each in crcs.items()}
    return tuple(next(left[owner]) for owner in self._owners.of[fragment])

  # Shards -------------------------------------------------------------------

  def events_of(
    self,
    machine: Syncer,
    session: ControlSession | None,
    said: ShardAnswer | ShardLost,
  ) -> Iterator[events.Event]:
    """Yields the machine's events for a shard's message.

    A session of None is the lead's.
    """
    event = None
    if session is None:
      event = self.heard(said)
    elif isinstance(getattr(said, 'answer', None), orders.ShardHello):
      yield from self._welcome(machine, session, said.answer)
    elif self.session_of(said.shard) is not session:
      return  # It was replaced.
    elif isinstance(said, ShardLost):
      event = self.lose(said.shard, said.reason)
    else:
      event = self.heard(said)
    if event is not None:
      yield event

  def _welcome(
    self, machine: Syncer, session: ControlSession, hello: orders.ShardHello
  ) -> Iterator[events.Event]:
    reason = self.why_refused(hello)
    if reason is not None:
      logging.warning('shard %d refused: %s', hello.shard, reason)
      session.send(messages.Refusal(reason, final=True))
      session.close(reason)
      return
    older = self.session_of(hello.shard)
    if older is not None:
      yield self.lose(hello.shard, 'a newer process took its place')
      older.close('a newer process took its place')
    logging.info('shard %d is here', hello.shard)
    back = self.join(session, hello, machine.knows_less)
    if back is not None:
      yield back

  def join(
    self, session: ControlSession, hello: orders.ShardHello, believed: bool
  ) -> events.Back | None:
    """Adds a shard; returns the fragments that are now complete."""
    shard = hello.shard
    assert shard not in self.remote, f'{shard=} is here'
    outer = zip(hello.outer_versions, hello.outer_crcs)
    self.remote[shard] = RemoteShard(
      session,
      hello.process,
      hello.address,
      time.monotonic(),
      dict(zip(hello.fragments, zip(hello.versions, hello.crcs))),
      dict(zip(hello.fragments, outer)),
    )
    session.send(orders.Accepted())
    for key, known in sorted(self._addresses.items()):
      session.send(self._admission(shard, key, *known))
    held = tuple(
      self.held(p, believed)
      for p in hello.fragments
      if all(not s or s in self.remote for s in self._owners.of_fragment(p))
    )
    return events.Back(held) if held else None

  def lose(self, shard: int, reason: str) -> events.Absent:
    """Removes a shard; orders for its fragments are given up."""
    del self.remote[shard]
    self.unsaved.discard(shard)
    fragments = self._owners.of_shard(shard)
    for number, job in list(self._jobs.items()):
      if job.fragment in fragments:
        del self._jobs[number]
        if job.given_up is not None:
          job.given_up(job.answers)
    return events.Absent(fragments, f'shard {shard} is away: {reason}')

  # Sessions -----------------------------------------------------------------

  def admit(
    self,
    learner: int,
    incarnation: int,
    addresses: Sequence[str],
    partition: str,
  ) -> tuple[str, ...] | None:
    """Returns where a learner pulls, by part; None if its address is unusable.

    The other shards announce their addresses themselves, in a `ShardAt`.
    """
    shards = self._owners.shards
    if not addresses or len(addresses) % shards:
      return None
    key = learner, incarnation
    known = tuple(addresses), partition
    admitted = self._lead.perform(self._admission(0, key, *known))
    if not admitted.addresses:
      return None
    self._addresses[key] = known
    for shard, remote in self.remote.items():
      remote.session.send(self._admission(shard, key, *known))
    others = [''] * (shards - 1)
    return tuple(x for own in admitted.addresses for x in (own, *others))

  def release(self, learner: int, incarnation: int):
    """Notes that a session has ended."""
    self._addresses.pop((learner, incarnation), None)
    self._tell_all(orders.Release(learner, incarnation))

  def retire(self, effect: events.Retire):
    """Releases offers that a learner has fetched."""
    self._tell_all(
      orders.RetireParts(effect.learner, effect.incarnation, effect.handles)
    )

  # What the machine wants ---------------------------------------------------

  def pull(self, effect: events.Pull):
    """Pulls an offer's bytes; the event comes with the last answer."""
    handle = effect.offer.payload.handle
    key = effect.round, effect.learner, effect.incarnation, handle
    p = effect.offer.fragment

    def done(answers: Answers):
      self._pulled[key] = self._pulling.pop(key)
      norms = (answer.norm for answer in answers.values())
      return events.Pulled(*key, math.hypot(*norms))

    def failed(answer: orders.PartFailed):
      # The other parts are of no use alone.
      self._tell_all(orders.CancelPart(self._pulling.pop(key)))
      return events.PullFailed(*key, answer.reason, answer.unusable)

    job = self._pulling[key] = self._begin(p, done, failed)
    session = effect.learner, effect.incarnation
    self._order(
      job,
      orders.PullPart(job, effect.round, *session, p, effect.offer.payload),
    )

  def cancel(self, effect: events.CancelPull):
    """Cancels a pull, whatever its state."""
    key = effect.round, effect.learner, effect.incarnation, effect.handle
    job = self._pulling.pop(key, None) or self._pulled.pop(key, None)
    if job is not None:
      self._jobs.pop(job, None)
      self._tell_all(orders.CancelPart(job))

  def merge(self, effect: events.Merge):
    """Makes the outer step; the event comes with the last answer."""
    shares = effect.shares
    pulls = tuple(
      self._pulled.pop((effect.round, s.learner, s.incarnation, s.handle))
      for s in shares
    )

    def done(answers: Answers):
      crcs = {s: answer.crcs for s, answer in answers.items()}
      parts = {s: answer.part for s, answer in answers.items()}
      self._merged[effect.round] = CompletedOuterStep(
        job,
        self.compose(effect.fragment, crcs),
        self._by_shard(parts),
      )
      return events.Merged(effect.round)

    job = self._begin(effect.fragment, done)
    self._order(
      job,
      orders.MergePart(
        job,
        effect.round,
        effect.fragment,
        pulls,
        tuple(share.learner for share in shares),
        tuple(share.weight for share in shares),
      ),
    )

  def take_merged(self, round_: int) -> CompletedOuterStep:
    """Returns the result of a round's merge, to be published."""
    return self._merged.pop(round_)

  def install(
    self, effect: events.Publish, merged: CompletedOuterStep, here: bool
  ):
    """Installs the lead's pieces, or has the other shards install theirs.

    The lead's come first, and are the run's new version; the others follow once
    the ledger has the close.
    """
    p = effect.fragment
    if here:
      self.run[p] = effect.version, merged.crc
    for shard in self._owners.of_fragment(p):
      if (shard == 0) != here or (shard and shard not in self.remote):
        continue
      self._tell(shard, orders.InstallPart(merged.job, effect.round, p))
      if shard:
        pairs = zip(merged.crcs, self._owners.of[p])
        own = tuple(crc for crc, owner in pairs if owner == shard)
        remote = self.remote[shard]
        remote.held[p] = remote.outer[p] = effect.version, own

  def publish(
    self,
    fragment: int,
    merged: CompletedOuterStep,
    recipients: Iterable[tuple[int, int]],
    done: Callable[[tuple[int, int], Payload, tuple[int, ...]], None],
  ):
    """Offers the outer update to sessions.

    Args:
      done: called with each session and what to tell it: the payload, and for a
        learner of several hosts the CRCs of their slices of Θ_p, by part.
    """
    codec = self._run_spec.down.name
    to = tuple(
      orders.Recipient(*key, next(self._handles)) for key in recipients
    )

    def offered(answers: Answers):
      for each in to:
        parts, crcs = self._by_part(each, answers, merged.parts)
        found = announced_parts(each.handle, codec, parts)
        done((each.learner, each.incarnation), found, crcs)

    # A learner told of a dead shard's offer asks for the whole fragment.
    job = self._begin(fragment, offered, given_up=offered)
    self._order(job, orders.PublishPart(job, merged.job, fragment, to))

  def serve(
    self,
    effect: events.SendFull,
    done: Callable[[Payload, tuple[int, ...]], None],
  ):
    """Offers the full fragment to one session; calls `done` with what to tell
    it.
    """
    key = effect.learner, effect.incarnation
    to = orders.Recipient(*key, next(self._handles))

    def offered(answers: Answers):
      whole = {s: answer.part for s, answer in answers.items()}
      parts, crcs = self._by_part(to, answers, self._by_shard(whole))
      codec = self._run_spec.full.name
      done(announced_parts(to.handle, codec, parts), crcs)

    def given_up(answers: Answers):
      """Uses the expected byte length of each part that has not arrived."""
      p, full = effect.fragment, self._run_spec.full
      parts = {s: answer.part for s, answer in answers.items()}
      for s in self._owners.of_fragment(p):
        nbytes = payload.payload_bytes(self._owners.pieces(p, s), full)
        parts.setdefault(s, Part(nbytes, 0))
      found = announced_parts(to.handle, full.name, self._by_shard(parts))
      done(found, ())

    job = self._begin(effect.fragment, offered, given_up=given_up)
    self._order(job, orders.ServePart(job, effect.fragment, to))

  def take(self, effect: events.TakeFragment):
    """Pulls a learner's copy of a lost fragment; answers with an event."""
    p, session = effect.offered.fragment, (effect.learner, effect.incarnation)

    def done(answers: Answers):
      crcs = {s: answer.crcs for s, answer in answers.items()}
      crc = payload.crc_of(self.compose(p, crcs))
      if crc != effect.crc:
        reason = (
          f'Unusable: CRC {crc:08x} of fragment {p}, the run has '
          f'{effect.crc:08x}'
        )
        return events.FragmentFailed(p, *session, reason)
      self._taken[p, session] = job, crcs
      return events.FragmentTaken(p, *session)

    def failed(answer: orders.PartFailed):
      return events.FragmentFailed(p, *session, answer.reason)

    job = self._begin(p, done, failed)
    self._order(job, orders.TakePart(job, *session, p, effect.offered.payload))

  def relabel(self, effect: events.AdoptVersion):
    """Makes a donated fragment, or the one that is here, Θ_p."""
    p = effect.fragment
    job, crcs = (effect.taken_of and self._taken[p, effect.taken_of]) or (0, {})
    self._taken = {k: x for k, x in self._taken.items() if k[0] != p}
    order = orders.GoOn(p, effect.version, job)
    found = {}
    for shard in self._owners.of_fragment(p):
      self._tell(shard, order)
      found[shard] = crcs.get(shard) or self.part_held(shard, p)[1]
      if shard:
        self.remote[shard].held[p] = effect.version, found[shard]
    crc = payload.crc_of(self.compose(p, found))
    self.run[p] = effect.version, crc

  def save(self, closed_round: int, loss: float | None, last: bool):
    """Has all other shards save a checkpoint as of a round.

    If it is the last one, they are `unsaved` until they report that it is on
    disk.
    """
    losses = () if loss is None else (loss,)
    self.unsaved = set(self.remote) if last else set()
    for shard in self.remote:
      job = next(self._numbers)
      self._tell(shard, orders.SaveParts(job, closed_round, losses, wait=last))

  def collect(
    self,
    fragment: int,
    done: Callable[[Mapping[int, tuple[str, Payload]]], None],
  ):
    """Collects a fragment's bytes from all shards but the lead.

    Args:
      done: called with address and payload by shard; with nothing if a shard is
        away.
    """
    others = [s for s in self._owners.of_fragment(fragment) if s]
    if any(s not in self.remote for s in others):
      done({})
      return

    def offered(answers: Answers):
      full = self._run_spec.full.name
      done(
        {
          s: (
            self.remote[s].address,
            Payload(job, full, answer.part.nbytes, answer.part.crc),
          )
          for s, answer in answers.items()
        }
      )

    job = self._begin(fragment, offered, given_up=lambda answers: done({}))
    self._jobs[job].waiting = set(others)
    self._order(job, orders.CollectPart(job, fragment))

  def depart(self):
    """Tells all other shards that the run is over."""
    for shard in self.remote:
      self._tell(shard, orders.Depart())

  # Jobs ---------------------------------------------------------------------

  def heard(self, said: ShardAnswer) -> events.Event | None:
    """Handles a shard's answer; returns the event for the machine, if any."""
    answer = said.answer
    if said.shard in self.remote:
      self.remote[said.shard].heard_s = time.monotonic()
    match answer:
      case messages.Alive():
        return None
      case orders.Saved():
        self.unsaved.discard(said.shard)
        return None
      case orders.Admitted():
        self._tell_where(said.shard, answer)
        return None
    job = self._jobs.get(answer.job)
    if job is None:
      return None  # It was given up.
    if isinstance(answer, orders.PartFailed):
      del self._jobs[answer.job]
      return job.failed(answer)
    job.waiting.discard(said.shard)
    job.answers[said.shard] = answer
    if job.waiting:
      return None
    del self._jobs[answer.job]
    return job.done(job.answers)

  def _by_part(
    self, to: orders.Recipient, answers: Answers, whole: tuple[Part, ...]
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
    hosts = range(len(next(iter(found.values())).parts))
    pairs = [
      (found[s].parts[h], found[s].crcs[h]) if s in found else (NOTHING, 0)
      for h in hosts
      for s in range(self._owners.shards)
    ]
    return tuple(part for part, _ in pairs), tuple(crc for _, crc in pairs)

  def _by_shard(self, parts: Mapping[int, Part]) -> tuple[Part, ...]:
    return tuple(parts.get(s, NOTHING) for s in range(self._owners.shards))

  def _admission(
    self,
    shard: int,
    key: tuple[int, int],
    addresses: Sequence[str],
    partition: str,
  ) -> orders.Admit:
    own = tuple(addresses[shard :: self._owners.shards])
    return orders.Admit(*key, own, partition)

  def _tell_where(self, shard: int, admitted: orders.Admitted):
    key = admitted.learner, admitted.incarnation
    if admitted.addresses and key in self._addresses:
      self._say(key, messages.ShardAt(shard, admitted.addresses))

  def _begin(self, fragment: int, done, failed=_never, given_up=None) -> int:
    number = next(self._numbers)
    waiting = set(self._owners.of_fragment(fragment))
    self._jobs[number] = ShardRequest(fragment, waiting, done, failed, given_up)
    return number

  def _order(self, job: int, order):
    for shard in sorted(self._jobs[job].waiting):
      self._tell(shard, order)

  def _tell_all(self, order):
    for shard in (0, *self.remote):
      self._tell(shard, order)

  def _tell(self, shard: int, order):
    if shard:
      # If that session has just ended, the machine will hear of it.
      self.remote[shard].session.send(order)
      return
    answer = self._lead.perform(order)
    if answer is not None:
      event = self.heard(ShardAnswer(shard, answer))
      assert event is None, f'{event=} while effects are performed'
