# SPDX-License-Identifier: Apache-2.0
"""All shards as one: what the machine wants done, by whoever has the bytes.

Each effect that moves bytes is a *job*: an order to every shard that owns a
piece of the fragment, and what to do once all have answered. Only the thread
of the machine comes here.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from diloco.numerics import payload
from diloco.protocol import shard_messages as orders
from diloco.protocol import syncer_io
from diloco.protocol.messages import Part, Payload
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.parts import announced_parts
from diloco.runtime.shard import Shard

NOTHING = Part(0, 0)
Answers = Mapping[int, object]  # By shard.


@dataclasses.dataclass(frozen=True)
class FromShard:
  """Something a shard says, on its way to the machine's thread."""

  shard: int
  answer: object  # One of shard_messages.FROM_SHARD.


@dataclasses.dataclass
class _Job:
  """An order that was given to some shards."""

  fragment: int
  waiting: set[int]  # Shards that have not answered.
  done: Callable[[Answers], syncer_io.Event | None]
  failed: Callable[[orders.PartFailed], syncer_io.Event | None]
  answers: dict[int, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Merged:
  """An outer step that all owners of the fragment have made."""

  job: int
  crcs: tuple[int, ...]  # Of the resulting pieces, in the layout's order.
  parts: tuple[Part, ...]  # Of the outer update, by shard.

  @property
  def crc(self) -> int:
    """Of the resulting Θ_p."""
    return payload.crc_of(self.crcs)


def _never(answer: orders.PartFailed):
  raise AssertionError(f'no answer to what was ordered: {answer}')


class Shards:
  """The shards of one syncer.

  Args:
    blueprint: of the run.
    lead: the shard of this process.
  """

  def __init__(self, blueprint: Blueprint, lead: Shard):
    self._blueprint = blueprint
    self._owners = blueprint.owners
    self._lead = lead
    self._numbers = itertools.count(1)
    self._handles = itertools.count(1)
    self._jobs: dict[int, _Job] = {}
    self._pulled: dict[tuple[int, int, int], int] = {}  # Jobs.
    self._merged: dict[int, Merged] = {}  # By round.
    self._taken: dict[tuple[int, tuple[int, int]], int] = {}  # Jobs.

  def crcs(self) -> tuple[int, ...]:
    """Of the bytes of every fragment."""
    return self._lead.model.crcs()

  def versions(self) -> tuple[int, ...]:
    """Of every fragment."""
    return self._lead.model.versions()

  # Sessions -----------------------------------------------------------------

  def admit(
    self,
    learner: int,
    incarnation: int,
    addresses: Sequence[str],
    partition: str,
  ) -> tuple[str, ...] | None:
    """Where a learner pulls, by part; None: its own address is of no use."""
    if not addresses or len(addresses) % self._owners.shards:
      return None
    own = tuple(addresses[0 :: self._owners.shards])
    admitted = self._lead.perform(
      orders.Admit(learner, incarnation, own, partition)
    )
    return admitted.addresses or None

  def release(self, learner: int, incarnation: int):
    """A session has ended."""
    self._tell_all(orders.Release(learner, incarnation))

  def retire(self, effect: syncer_io.Retire):
    """A learner has fetched these."""
    self._tell_all(
      orders.RetireParts(effect.learner, effect.incarnation, effect.handles)
    )

  # What the machine wants ---------------------------------------------------

  def pull(self, effect: syncer_io.Pull):
    """An offer's bytes; the event comes with the last answer."""
    key = effect.round, effect.learner, effect.incarnation
    p = effect.offer.fragment

    def done(answers: Answers):
      self._pulled[key] = job
      norms = (answer.norm for answer in answers.values())
      return syncer_io.Pulled(*key, math.hypot(*norms))

    def failed(answer: orders.PartFailed):
      return syncer_io.PullFailed(*key, answer.reason, answer.unusable)

    job = self._begin(p, done, failed)
    session = effect.learner, effect.incarnation
    self._order(
      job,
      orders.PullPart(job, effect.round, *session, p, effect.offer.payload),
    )

  def merge(self, effect: syncer_io.Merge):
    """The outer step; the event comes with the last answer."""
    shares = effect.shares
    pulls = tuple(
      self._pulled[effect.round, share.learner, share.incarnation]
      for share in shares
    )
    for key in [key for key in self._pulled if key[0] <= effect.round]:
      del self._pulled[key]

    def done(answers: Answers):
      crcs = {s: answer.crcs for s, answer in answers.items()}
      parts = {s: answer.part for s, answer in answers.items()}
      self._merged[effect.round] = Merged(
        job, self._compose(effect.fragment, crcs), self._by_shard(parts)
      )
      return syncer_io.Merged(effect.round)

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

  def take_merged(self, round_: int) -> Merged:
    """What the merge of a round led to; it is to be published."""
    return self._merged.pop(round_)

  def install(self, fragment: int, merged: Merged):
    """It is Θ_p from now on."""
    self._order_owners(fragment, orders.InstallPart(merged.job, fragment))

  def publish(
    self,
    fragment: int,
    merged: Merged,
    recipients: Iterable[tuple[int, int]],
    done: Callable[[tuple[int, int], Payload, tuple[int, ...]], None],
  ):
    """Offers the outer update.

    Args:
      fragment: which.
      merged: what it led to.
      recipients: sessions.
      done: called with each session and what to tell it: the payload, and of
        a learner of several hosts the CRCs of their boxes of Θ_p, by part.
    """
    codec = self._blueprint.down.name
    to = tuple(
      orders.Recipient(*key, next(self._handles)) for key in recipients
    )

    def offered(answers: Answers):
      for each in to:
        parts, crcs = self._by_part(each, answers, merged.parts)
        found = announced_parts(each.handle, codec, parts)
        done((each.learner, each.incarnation), found, crcs)

    job = self._begin(fragment, offered)
    self._order(job, orders.PublishPart(job, merged.job, fragment, to))

  def serve(
    self,
    effect: syncer_io.Serve,
    done: Callable[[Payload, tuple[int, ...]], None],
  ):
    """Offers the full fragment to one session; `done`: what to tell it."""
    key = effect.learner, effect.incarnation
    to = orders.Recipient(*key, next(self._handles))

    def offered(answers: Answers):
      whole = {s: answer.part for s, answer in answers.items()}
      parts, crcs = self._by_part(to, answers, self._by_shard(whole))
      codec = self._blueprint.full.name
      done(announced_parts(to.handle, codec, parts), crcs)

    job = self._begin(effect.fragment, offered)
    self._order(job, orders.ServePart(job, effect.fragment, to))

  def take(self, effect: syncer_io.TakeFragment):
    """A learner's copy of what is lost; the event comes with the answers."""
    p, session = effect.offered.fragment, (effect.learner, effect.incarnation)

    def done(answers: Answers):
      crcs = {s: answer.crcs for s, answer in answers.items()}
      crc = payload.crc_of(self._compose(p, crcs))
      if crc != effect.crc:
        reason = (
          f'Unusable: CRC {crc:08x} of fragment {p}, the run has '
          f'{effect.crc:08x}'
        )
        return syncer_io.FragmentFailed(p, *session, reason)
      self._taken[p, session] = job
      return syncer_io.FragmentTaken(p, *session)

    def failed(answer: orders.PartFailed):
      return syncer_io.FragmentFailed(p, *session, answer.reason)

    job = self._begin(p, done, failed)
    self._order(job, orders.TakePart(job, *session, p, effect.offered.payload))

  def relabel(self, effect: syncer_io.Relabel):
    """What a learner gave, or else what is here, is Θ_p."""
    p = effect.fragment
    taken = effect.taken_of and self._taken[p, effect.taken_of]
    self._taken = {k: job for k, job in self._taken.items() if k[0] != p}
    self._order_owners(p, orders.GoOn(p, effect.version, taken or 0))

  # Jobs ---------------------------------------------------------------------

  def heard(self, said: FromShard) -> syncer_io.Event | None:
    """An answer; what the machine is to know of it."""
    answer = said.answer
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

  def _begin(self, fragment: int, done, failed=_never) -> int:
    number = next(self._numbers)
    waiting = set(self._owners.of_fragment(fragment))
    self._jobs[number] = _Job(fragment, waiting, done, failed)
    return number

  def _order(self, job: int, order):
    for shard in sorted(self._jobs[job].waiting):
      self._tell(shard, order)

  def _order_owners(self, fragment: int, order):
    for shard in self._owners.of_fragment(fragment):
      self._tell(shard, order)

  def _tell_all(self, order):
    for shard in range(self._owners.shards):
      self._tell(shard, order)

  def _tell(self, shard: int, order):
    assert shard == self._lead.shard, f'{shard=} is not here'
    answer = self._lead.perform(order)
    if answer is not None:
      event = self.heard(FromShard(shard, answer))
      assert event is None, f'{event=} while effects are performed'

  def _compose(
    self, fragment: int, crcs: Mapping[int, Sequence[int]]
  ) -> tuple[int, ...]:
    """The CRCs of a fragment's pieces, in its order, from those by shard."""
    left = {shard: iter(each) for shard, each in crcs.items()}
    return tuple(next(left[owner]) for owner in self._owners.of[fragment])

  def _by_part(
    self,
    to: orders.Recipient,
    answers: Answers,
    whole: tuple[Part, ...],
  ) -> tuple[tuple[Part, ...], tuple[int, ...]]:
    """The parts for one session, and the CRCs of its hosts' boxes.

    Args:
      to: the session.
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
    shards = range(self._owners.shards)
    hosts = range(len(next(iter(found.values())).parts))
    pairs = [
      (found[s].parts[h], found[s].crcs[h]) if s in found else (NOTHING, 0)
      for h in hosts
      for s in shards
    ]
    return tuple(part for part, _ in pairs), tuple(crc for _, crc in pairs)

  def _by_shard(self, parts: Mapping[int, Part]) -> tuple[Part, ...]:
    shards = range(self._owners.shards)
    return tuple(parts.get(shard, NOTHING) for shard in shards)
