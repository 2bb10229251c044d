# SPDX-License-Identifier: Apache-2.0
"""All shards as one: turns the machine's effects into orders to shards.

Each effect that moves bytes is a *job*: an order to every shard that owns a
piece of the fragment, and a continuation for when all have answered. Only the
machine's thread uses this module.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from diloco.numerics import payload
from diloco.protocol import messages
from diloco.protocol import shard_messages as orders
from diloco.protocol.messages import Payload
from diloco.protocol.syncer import events
from diloco.run.payload_parts import announced_parts
from diloco.run.spec import RunSpec
from diloco.syncer import shard_registry
from diloco.syncer.shard import Shard
from diloco.syncer.shard_registry import (
  Answers,
  CompletedOuterStep,
  PullKey,
  RemoteShard,
  ShardAnswer,
  ShardRegistry,
  ShardRequest,
  admission,
  by_part,
  by_shard,
  expected_parts,
)
from diloco.transport.control_server import ControlSession


class ShardCoordinator:
  """The shards of one syncer.

  Args:
    say: sends a message to a session of a learner, in its order.

  Attributes:
    unsaved: shards that are writing their last checkpoint.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    lead: Shard,
    registry: ShardRegistry,
    say: Callable[[tuple[int, int], object], None],
  ):
    self._run_spec = run_spec
    self._owners = run_spec.owners
    self._lead = lead
    self._registry = registry
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

  # Shards -------------------------------------------------------------------

  def join(
    self, session: ControlSession, hello: orders.ShardHello, believed: bool
  ) -> events.Back | None:
    """Adds a shard; returns the fragments that are now complete."""
    shard = hello.shard
    assert shard not in self._registry.remote, f'{shard=} is here'
    outer = zip(hello.outer_versions, hello.outer_crcs)
    self._registry.remote[shard] = RemoteShard(
      session,
      hello.process,
      hello.address,
      time.monotonic(),
      dict(zip(hello.fragments, zip(hello.versions, hello.crcs))),
      dict(zip(hello.fragments, outer)),
    )
    session.send(orders.Accepted())
    for key, known in sorted(self._addresses.items()):
      session.send(admission(self._owners, shard, key, *known))
    held = tuple(
      self._registry.held(p, believed)
      for p in hello.fragments
      if all(
        not s or s in self._registry.remote for s in self._owners.of_fragment(p)
      )
    )
    return events.Back(held) if held else None

  def lose(self, shard: int, reason: str) -> events.Absent:
    """Removes a shard; orders for its fragments are given up."""
    del self._registry.remote[shard]
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
    admitted = self._lead.perform(admission(self._owners, 0, key, *known))
    if not admitted.addresses:
      return None
    self._addresses[key] = known
    for shard, remote in self._registry.remote.items():
      remote.session.send(admission(self._owners, shard, key, *known))
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
        self._registry.compose(effect.fragment, crcs),
        by_shard(self._owners, parts),
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

  def install_here(self, effect: events.Publish, merged: CompletedOuterStep):
    """Installs the lead's pieces and notes the run's new version."""
    p = effect.fragment
    self._registry.run[p] = effect.version, merged.crc
    if 0 in self._owners.of_fragment(p):
      self._tell(0, orders.InstallPart(merged.job, effect.round, p))

  def install_there(self, effect: events.Publish, merged: CompletedOuterStep):
    """Has the other shards install theirs, once the ledger has the close."""
    p = effect.fragment
    for shard in self._owners.of_fragment(p):
      if shard in self._registry.remote:
        self._tell(shard, orders.InstallPart(merged.job, effect.round, p))
        crcs = self._registry.crcs_of(shard, p, merged.crcs)
        self._registry.remote[shard].held[p] = effect.version, crcs
        self._registry.remote[shard].outer[p] = effect.version, crcs

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
        parts, crcs = by_part(self._owners, each, answers, merged.parts)
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
      parts, crcs = by_part(
        self._owners, to, answers, by_shard(self._owners, whole)
      )
      codec = self._run_spec.full.name
      done(announced_parts(to.handle, codec, parts), crcs)

    def given_up(answers: Answers):
      """Uses the expected byte length of each part that has not arrived."""
      full = self._run_spec.full
      parts = expected_parts(self._owners, effect.fragment, full, answers)
      done(
        announced_parts(to.handle, full.name, by_shard(self._owners, parts)), ()
      )

    job = self._begin(effect.fragment, offered, given_up=given_up)
    self._order(job, orders.ServePart(job, effect.fragment, to))

  def take(self, effect: events.TakeFragment):
    """Pulls a learner's copy of a lost fragment; answers with an event."""
    p, session = effect.offered.fragment, (effect.learner, effect.incarnation)

    def done(answers: Answers):
      crcs = {s: answer.crcs for s, answer in answers.items()}
      crc = payload.crc_of(self._registry.compose(p, crcs))
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
      found[shard] = crcs.get(shard) or self._registry.part_held(shard, p)[1]
      if shard:
        self._registry.remote[shard].held[p] = effect.version, found[shard]
    crc = payload.crc_of(self._registry.compose(p, found))
    self._registry.run[p] = effect.version, crc

  def save(self, closed_round: int, loss: float | None, last: bool):
    """Has all other shards save a checkpoint as of a round.

    If it is the last one, they are `unsaved` until they report that it is on
    disk.
    """
    losses = () if loss is None else (loss,)
    self.unsaved = set(self._registry.remote) if last else set()
    for shard in self._registry.remote:
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
    if any(s not in self._registry.remote for s in others):
      done({})
      return

    def offered(answers: Answers):
      full = self._run_spec.full.name
      done(
        {
          s: (
            self._registry.remote[s].address,
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
    for shard in self._registry.remote:
      self._tell(shard, orders.Depart())

  # Jobs ---------------------------------------------------------------------

  def heard(self, said: ShardAnswer) -> events.Event | None:
    """Handles a shard's answer; returns the event for the machine, if any."""
    answer = said.answer
    if said.shard in self._registry.remote:
      self._registry.remote[said.shard].heard_s = time.monotonic()
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

  def _tell_where(self, shard: int, admitted: orders.Admitted):
    key = admitted.learner, admitted.incarnation
    if admitted.addresses and key in self._addresses:
      self._say(key, messages.ShardAt(shard, admitted.addresses))

  def _begin(
    self, fragment: int, done, failed=shard_registry.never, given_up=None
  ) -> int:
    number = next(self._numbers)
    waiting = set(self._owners.of_fragment(fragment))
    self._jobs[number] = ShardRequest(fragment, waiting, done, failed, given_up)
    return number

  def _order(self, job: int, order):
    for shard in sorted(self._jobs[job].waiting):
      self._tell(shard, order)

  def _tell_all(self, order):
    for shard in (0, *self._registry.remote):
      self._tell(shard, order)

  def _tell(self, shard: int, order):
    if shard:
      # If that session has just ended, the machine will hear of it.
      self._registry.remote[shard].session.send(order)
      return
    answer = self._lead.perform(order)
    if answer is not None:
      event = self.heard(ShardAnswer(shard, answer))
      assert event is None, f'{event=} while effects are performed'
