# SPDX-License-Identifier: Apache-2.0
"""All shards as one: turns the machine's effects into orders to shards.

Each effect that moves bytes is a *job*: an order to the shard that owns the
fragment, and a continuation for its answer. The leader's own shard takes the
same orders. Only the machine's thread uses this module.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

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

SILENCE_S = 6.0  # At patience 1; a shard speaks at least once a second.
LOOK_EVERY_S = 2.0  # The leader looks at least so often.
UNKNOWN = (-1, 0)  # A version and a CRC that no fragment has.
Key = tuple[int, int]  # (learner, incarnation)
# (round, learner, incarnation, handle): two offers of one learner for the
# same round differ only in the handle.
PullKey = tuple[int, int, int, int]
NOTHING = Part(0, 0)


@dataclasses.dataclass
class PresentShard:
  """The leader's own shard, or one in another process while it has a session.

  Attributes:
    held: by fragment, version and CRC of Θ_p there.
    outer: by fragment, version and CRC of the Θ_p to which its outer state
      belongs.
    session: None: it is the leader's own.
    process: its number.
    address: where the leader pulls what it collects.
    heard_s: when it last spoke.
  """

  held: dict[int, tuple[int, int]]
  outer: dict[int, tuple[int, int]]
  session: ControlSession | None = None
  process: int = 0
  address: str = ''
  heard_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class ShardAnswer:
  """A shard's answer, on its way to the machine's thread."""

  shard: int
  # One of shard_messages.FROM_SHARD; a text: why its session has closed.
  answer: object


def _never(answer: orders.PartFailed | None):
  raise AssertionError(f'no answer to what was ordered: {answer}')


def _nobody():
  """No caller waits for what was given up."""


@dataclasses.dataclass(frozen=True)
class ShardRequest:
  """An order that a shard has not answered yet."""

  fragment: int
  done: Callable[[object], events.Event | None]
  failed: Callable[[orders.PartFailed], events.Event | None] = _never
  given_up: Callable[[], None] = _nobody


class ShardCoordinator:
  """The shards of one syncer, as its leader, shard 0, sees them.

  Args:
    versions: version of every fragment, as far as the ledger knows.
    crcs: CRCs of their bytes; None: unknown.
    say: sends a message to a session of a learner, in its order.

  Attributes:
    run: version and CRC that the run has of each fragment; of the leader's own,
      those that are here.
    merged: outer steps that are to be published, by round.
    unsaved: shards that are writing their last checkpoint.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    leader: Shard,
    versions: Sequence[int],
    crcs: Sequence[int | None],
    say: Callable[[Key, object], None],
  ):
    self._run_spec = run_spec
    self._owners = run_spec.owners
    self._leader = leader
    here = leader.model
    held = dict(enumerate(zip(here.versions(), here.crcs())))
    held = {p: held[p] for p in here.owned}
    outer = {p: here.outer_of(p) for p in here.owned}
    outer = {p: (at, payload.crc_of(each)) for p, (at, each) in outer.items()}
    self._present = {0: PresentShard(held, outer)}
    self.run = [held.get(p, mine) for p, mine in enumerate(zip(versions, crcs))]
    self._say = say
    self.unsaved: set[int] = set()
    # By session: its addresses, and how its hosts cut a fragment.
    self._addresses: dict[Key, tuple[tuple[str, ...], str]] = {}
    self._looked_s = time.monotonic()
    # Unique across leaders, since a shard outlives its leader.
    self._numbers = itertools.count(time.time_ns() // 1000)
    self._handles = itertools.count(1)
    self._jobs: dict[int, ShardRequest] = {}
    # Jobs of pulls, in progress or done.
    self._pulls: dict[PullKey, int] = {}
    self.merged: dict[int, orders.PartMerged] = {}
    # Job and CRC of a learner's copy of a lost fragment.
    self._taken: dict[tuple[int, Key], tuple[int, int]] = {}

  # What the shards hold -----------------------------------------------------

  @property
  def elsewhere(self) -> tuple[int, ...]:
    """The fragments that other shards than the leader own."""
    return tuple(p for p, owner in enumerate(self._owners.shard_of) if owner)

  def crcs(self) -> tuple[int | None, ...]:
    """Returns the CRC of every fragment's bytes, as the run has them."""
    return tuple(crc for _, crc in self.run)

  def versions(self) -> tuple[int, ...]:
    """Returns the version of every fragment, as the run has it."""
    return tuple(version for version, _ in self.run)

  def outer(self, fragment: int) -> tuple[int, int]:
    """Returns version and CRC to which a fragment's outer state belongs.

    It is `UNKNOWN` if its shard is not here.
    """
    owner = self._present.get(self._owners.shard_of[fragment])
    return owner.outer[fragment] if owner else UNKNOWN

  @property
  def _others(self) -> dict[int, PresentShard]:
    return {s: x for s, x in self._present.items() if s}

  def end_silent(self) -> Iterator[events.Event]:
    """Gives up shards that are silent: other processes wait for their bytes."""
    now_s = time.monotonic()
    away_s, self._looked_s = now_s - self._looked_s, now_s
    limit_s = SILENCE_S * self._run_spec.config.protocol.patience
    for shard, other in self._others.items():
      if away_s > LOOK_EVERY_S:  # This process itself was suspended.
        other.heard_s += away_s
      if other.heard_s < now_s - limit_s:
        reason = f'silent for {limit_s:.1f} s'
        other.session.close(reason)
        yield self.lose(shard, reason)

  def _session_of(self, shard: int) -> ControlSession | None:
    present = self._present.get(shard)
    return present and present.session

  def _why_refused(self, hello: orders.ShardHello) -> str | None:
    """Returns why a shard is refused; None if it is accepted."""
    config, owners = self._run_spec.config, self._owners
    if hello.protocol != messages.PROTOCOL_VERSION:
      return f'protocol {hello.protocol}, not {messages.PROTOCOL_VERSION}'
    if hello.run != config.name:
      return f'run {hello.run!r}, this leader serves {config.name!r}'
    if not 0 < hello.shard < owners.shards:
      return f'shard {hello.shard}: must be in 1 … {owners.shards - 1}'
    differing = run_config.differences(
      self._run_spec.fingerprints, hello.fingerprints
    )
    if differing:
      return f'another configuration: {differing}'
    own = owners.of_shard(hello.shard)
    pieces = [len(owners.pieces(p, hello.shard)) for p in own]
    if (
      hello.fragments != own
      or any(
        [len(row) for row in crcs] != pieces
        for crcs in (hello.crcs, hello.outer_crcs)
      )
      or not len(hello.versions) == len(hello.outer_versions) == len(own)
    ):
      return f'shard {hello.shard} speaks of other pieces than it owns'
    older = self._present.get(hello.shard)
    if older is not None and older.process > hello.process:
      return f'shard {hello.shard} has a newer process than this'
    return None

  def _held(self, shard: int, p: int, believed: bool) -> events.Held:
    """Returns what a shard holds of a fragment.

    Args:
      believed: a version newer than the ledger's is taken as the run's.
    """
    held, here = self._present[shard].held[p]
    version, crc = self.run[p]
    if held > version and not believed:
      return events.Held(p, held, crc, same=False)
    same = held != version or crc in (None, here)
    # The ledger was lost: it does not know the version, or not its bytes.
    if held > version or (held == version and crc is None):
      self.run[p] = held, here
    return events.Held(p, held, crc if held <= version else None, same)

  # Shards -------------------------------------------------------------------

  def events_of(
    self, machine: Syncer, session: ControlSession | None, message: ShardAnswer
  ) -> Iterator[events.Event]:
    """Yields the machine's events for a shard's message.

    A session of None is the leader's.
    """
    if isinstance(message.answer, orders.ShardHello):
      yield from self._welcome(machine, session, message.answer)
    elif session is not self._session_of(message.shard):
      return  # It was replaced.
    elif isinstance(message.answer, str):
      yield self.lose(message.shard, message.answer)
    elif (event := self.heard(message)) is not None:
      yield event

  def _welcome(
    self, machine: Syncer, session: ControlSession, hello: orders.ShardHello
  ) -> Iterator[events.Event]:
    reason = self._why_refused(hello)
    if reason is not None:
      logging.warning('shard %d refused: %s', hello.shard, reason)
      session.send(messages.Refusal(reason, final=True))
      session.close(reason)
      return
    older = self._session_of(hello.shard)
    if older is not None:
      yield self.lose(hello.shard, 'a newer process took its place')
      older.close('a newer process took its place')
    logging.info('shard %d is here', hello.shard)
    yield self.join(session, hello, machine.knows_less)

  def join(
    self, session: ControlSession, hello: orders.ShardHello, believed: bool
  ) -> events.ShardReturned:
    """Adds a shard; returns the fragments that are here with it."""
    shard = hello.shard
    assert shard not in self._present, f'{shard=} is here'

    def by_fragment(versions, crcs):
      pairs = zip(versions, map(payload.crc_of, crcs))
      return dict(zip(hello.fragments, pairs))

    self._present[shard] = PresentShard(
      by_fragment(hello.versions, hello.crcs),
      by_fragment(hello.outer_versions, hello.outer_crcs),
      session,
      hello.process,
      hello.address,
      time.monotonic(),
    )
    session.send(orders.Accepted())
    for key, known in sorted(self._addresses.items()):
      session.send(self._admission(shard, key, *known))
    return events.ShardReturned(
      tuple(self._held(shard, p, believed) for p in hello.fragments)
    )

  def lose(self, shard: int, reason: str) -> events.ShardLost:
    """Removes a shard; orders for its fragments are given up."""
    del self._present[shard]
    self.unsaved.discard(shard)
    fragments = self._owners.of_shard(shard)
    for number, job in list(self._jobs.items()):
      if job.fragment in fragments:
        del self._jobs[number]
        job.given_up()
    return events.ShardLost(fragments, f'shard {shard} is away: {reason}')

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
    admitted = self._leader.perform(self._admission(0, key, *known))
    if not admitted.addresses:
      return None
    self._addresses[key] = known
    for shard, other in self._others.items():
      other.session.send(self._admission(shard, key, *known))
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
    """Pulls an offer's bytes; the event comes with the answer."""
    offer, session = effect.offer, (effect.learner, effect.incarnation)
    key = effect.round, *session, offer.payload.handle

    def done(answer: orders.PartPulled):
      return events.Pulled(*key, answer.norm)

    def failed(answer: orders.PartFailed):
      del self._pulls[key]
      return events.PullFailed(*key, answer.reason, answer.unusable)

    self._pulls[key] = self._begin(
      ShardRequest(offer.fragment, done, failed),
      lambda job: orders.PullPart(
        job, effect.round, *session, offer.fragment, offer.payload
      ),
    )

  def cancel(self, effect: events.CancelPull):
    """Cancels a pull, whatever its state."""
    key = effect.round, effect.learner, effect.incarnation, effect.handle
    job = self._pulls.pop(key, None)
    if job is not None:
      self._jobs.pop(job, None)
      self._tell_all(orders.CancelPart(job))

  def merge(self, effect: events.Merge):
    """Makes the outer step; the event comes with the answer."""
    shares = effect.shares
    pulls = tuple(
      self._pulls.pop((effect.round, s.learner, s.incarnation, s.handle))
      for s in shares
    )

    def done(answer: orders.PartMerged):
      self.merged[effect.round] = answer
      return events.Merged(effect.round)

    self._begin(
      ShardRequest(effect.fragment, done),
      lambda job: orders.MergePart(
        job,
        effect.round,
        effect.fragment,
        pulls,
        tuple(share.learner for share in shares),
        tuple(share.weight for share in shares),
      ),
    )

  def install(
    self, effect: events.Publish, merged: orders.PartMerged, here: bool
  ):
    """Installs the result if the leader owns the fragment, or else has its
    owner do so.

    With `here` it comes first, and is the run's new version; other shards
    follow once the ledger has the close.
    """
    p, new = effect.fragment, (effect.version, payload.crc_of(merged.crcs))
    if here:
      self.run[p] = new
    owner = self._owners.shard_of[p]
    if (owner == 0) == here and owner in self._present:
      self._tell(owner, orders.InstallPart(merged.job, effect.round, p))
      self._present[owner].held[p] = self._present[owner].outer[p] = new

  def offer(
    self,
    fragment: int,
    merged: orders.PartMerged | None,
    recipients: Iterable[Key],
    done: Callable[[Key, Payload, tuple[int, ...]], None],
  ):
    """Offers an outer update, or the full fragment, to sessions.

    Args:
      merged: the outer step; None: the full fragment.
      done: called with each session and what to tell it: the payload, and for a
        learner of several hosts the CRCs of their slices of Θ_p, by part.
    """
    codec = self._run_spec.down if merged else self._run_spec.full
    to = tuple(
      orders.Recipient(*key, next(self._handles)) for key in recipients
    )

    def offered(whole: Part, hosts: Sequence[orders.HostParts] = ()):
      for recipient in to:
        parts, crcs = self._by_part(recipient, fragment, whole, hosts)
        announced = announced_parts(recipient.handle, codec.name, parts)
        done((recipient.learner, recipient.incarnation), announced, crcs)

    def given_up():
      """Announces what no shard offers: a learner asks for the fragment."""
      pieces = self._run_spec.layout.fragments[fragment]
      full = Part(payload.payload_bytes(pieces, codec), 0)
      offered(merged.part if merged else full)

    merge = merged.job if merged else 0
    self._begin(
      ShardRequest(
        fragment,
        lambda answer: offered(answer.part, answer.hosts),
        given_up=given_up,
      ),
      lambda job: orders.OfferPart(job, merge, fragment, to),
    )

  def take(self, effect: events.TakeFragment):
    """Pulls a learner's copy of a lost fragment; answers with an event."""
    p, session = effect.offered.fragment, (effect.learner, effect.incarnation)

    def done(answer: orders.PartTaken):
      crc = payload.crc_of(answer.crcs)
      if crc != effect.crc:
        reason = (
          f'Unusable: CRC {crc:08x} of fragment {p}, the run has '
          f'{effect.crc:08x}'
        )
        return events.FragmentFailed(p, *session, reason)
      self._taken[p, session] = answer.job, crc
      return events.FragmentTaken(p, *session)

    def failed(answer: orders.PartFailed):
      return events.FragmentFailed(p, *session, answer.reason)

    self._begin(
      ShardRequest(p, done, failed),
      lambda job: orders.PullPart(
        job, 0, *session, p, effect.offered.payload, lost=True
      ),
    )

  def relabel(self, effect: events.AdoptVersion):
    """Makes a donated fragment, or the one that is here, Θ_p."""
    p, owner = effect.fragment, self._owners.shard_of[effect.fragment]
    held = self._present[owner].held
    job, crc = 0, held[p][1]
    if effect.taken_of:
      job, crc = self._taken[p, effect.taken_of]
    self._taken = {k: x for k, x in self._taken.items() if k[0] != p}
    self._tell(owner, orders.GoOn(p, effect.version, job))
    self.run[p] = held[p] = effect.version, crc

  def save(self, closed_round: int, last: bool):
    """Has all other shards save a checkpoint as of a round.

    If it is the last one, they are `unsaved` until they report that it is on
    disk.
    """
    self.unsaved = set(self._others) if last else set()
    for shard in self._others:
      job = next(self._numbers)
      self._tell(shard, orders.SaveParts(job, closed_round, wait=last))

  def collect(
    self, fragment: int, done: Callable[[tuple[str, Payload] | None], None]
  ):
    """Asks another shard to offer a fragment to the leader.

    Args:
      done: called with address and payload; None: the shard is away.
    """
    owner = self._owners.shard_of[fragment]
    if owner not in self._present:
      done(None)
      return

    def offered(answer: orders.PartOffered):
      part, full = answer.part, self._run_spec.full.name
      announced = Payload(answer.job, full, part.nbytes, part.crc)
      done((self._present[owner].address, announced))

    self._begin(
      ShardRequest(fragment, offered, given_up=lambda: done(None)),
      lambda job: orders.OfferPart(job, 0, fragment, ()),
    )

  def depart(self):
    """Tells all other shards that the run is over."""
    for shard in self._others:
      self._tell(shard, orders.Depart())

  # Jobs ---------------------------------------------------------------------

  def heard(self, message: ShardAnswer) -> events.Event | None:
    """Handles a shard's answer; returns the event for the machine, if any."""
    answer = message.answer
    if message.shard in self._present:
      self._present[message.shard].heard_s = time.monotonic()
    match answer:
      case messages.Alive():
        return None
      case orders.Saved():
        self.unsaved.discard(message.shard)
        return None
      case orders.Admitted():
        key = answer.learner, answer.incarnation
        if answer.addresses and key in self._addresses:
          self._say(key, messages.ShardAt(message.shard, answer.addresses))
        return None
    job = self._jobs.pop(answer.job, None)
    if job is None:
      return None  # It was given up.
    if isinstance(answer, orders.PartFailed):
      return job.failed(answer)
    return job.done(answer)

  def _by_part(
    self,
    to: orders.Recipient,
    fragment: int,
    whole: Part,
    hosts: Sequence[orders.HostParts],
  ) -> tuple[tuple[Part, ...], tuple[int, ...]]:
    """Returns the parts for one session, and the CRCs of its hosts' slices.

    Args:
      whole: for a learner of one host.
      hosts: what is offered to learners of several hosts.
    """
    owner = self._owners.shard_of[fragment]

    def by_shard(own, other):
      return [own if s == owner else other for s in range(self._owners.shards)]

    for host in hosts:
      if (host.learner, host.incarnation) == (to.learner, to.incarnation):
        pairs = zip(host.parts, host.crcs)
        parts = [x for pair in pairs for x in by_shard(pair, (NOTHING, 0))]
        return tuple(part for part, _ in parts), tuple(crc for _, crc in parts)
    return tuple(by_shard(whole, NOTHING)), ()

  def _admission(
    self, shard: int, key: Key, addresses: Sequence[str], partition: str
  ) -> orders.Admit:
    own = tuple(addresses[shard :: self._owners.shards])
    return orders.Admit(*key, own, partition)

  def _begin(self, request: ShardRequest, order: Callable[[int], object]):
    """Orders a job of the fragment's owner; returns its number.

    Args:
      order: takes the number.
    """
    job = next(self._numbers)
    self._jobs[job] = request
    self._tell(self._owners.shard_of[request.fragment], order(job))
    return job

  def _tell_all(self, order):
    for shard in list(self._present):
      self._tell(shard, order)

  def _tell(self, shard: int, order):
    if shard:
      # If that session has just ended, the machine will hear of it.
      self._present[shard].session.send(order)
      return
    answer = self._leader.perform(order)
    if answer is not None:
      event = self.heard(ShardAnswer(shard, answer))
      assert event is None, f'{event=} while effects are performed'
