# SPDX-License-Identifier: Apache-2.0
"""A shard's bytes: its pieces of Θ, what is merged, what goes to learners.

It decides nothing: the leader of the syncer gives orders, and this executes
them in sequence. Pulls run concurrently on a pool, merges one after another on
a worker; both answer later. Orders that take no time are answered at once.
"""

import concurrent.futures
import threading
from collections.abc import Callable, Sequence

import numpy as np
from absl import logging

from diloco.numerics import payload
from diloco.numerics.codec import Codec
from diloco.protocol import messages
from diloco.protocol import shard_messages as orders
from diloco.protocol.config import UPDATES_KEPT
from diloco.run import payload_parts
from diloco.run.payload_parts import (
  Decode,
  SliceMap,
  TransferPace,
  part_of,
  read_slice_map,
)
from diloco.run.spec import RunSpec
from diloco.run.threads import Worker
from diloco.syncer.outer_state import OuterState, OuterStep
from diloco.transport.data_plane import (
  DataPlane,
  Fetcher,
  Publisher,
  TransferFailed,
)

MERGES_MAX = 64
CLOSINGS_MAX = 1 << 14

Arrays = dict[str, np.ndarray]  # Piece name -> f32 array.
Key = tuple[int, int]  # (learner, incarnation)


class PeerEnds:
  """A publisher and a fetcher for each host of the learner.

  Per fragment, it keeps the newest outer updates and one full fragment on
  offer, until the learner has fetched them: one over a slow link fetches
  several updates at one go, and one that is further behind the newest full
  fragment. The bytes are those of the merge: for all learners of one host the
  same arrays.
  """

  def __init__(
    self,
    publishers: Sequence[Publisher],
    fetchers: Sequence[Fetcher],
    slice_map: SliceMap,
  ):
    self.fetchers = tuple(fetchers)
    self.slice_map = slice_map
    self.addresses = tuple(publisher.address for publisher in publishers)
    self._publishers = tuple(publishers)
    # (kept, fragment) → handles.
    self._offered: dict[tuple[int, int], list[int]] = {}

  def offer(
    self, kept: int, fragment: int, handle: int, parts: Sequence[np.ndarray]
  ):
    """Offers each host its part.

    Args:
      kept: how many of the kind stay on offer; older ones are withdrawn.
    """
    for publisher, data in zip(self._publishers, parts, strict=True):
      if data.size:
        publisher.offer(handle, data)
    offered = self._offered.setdefault((kept, fragment), [])
    offered.append(handle)
    for before in offered[:-kept]:
      self.retire(before)

  def retire(self, handle: int):
    """Withdraws an offer, if it is there."""
    for offered in self._offered.values():
      if handle in offered:
        offered.remove(handle)
    for publisher in self._publishers:
      publisher.retire(handle)

  def close(self):
    """Ends the pulls and the offers."""
    for end in (*self.fetchers, *self._publishers):
      end.close()


class Shard:
  """One shard, in the process that has its bytes; orders are for one thread.

  Args:
    shard: number of the shard; the leader's is 0.
    answer: takes answers that come later, on any thread.
    crash: takes the error that ended a thread.

  Attributes:
    model: the own pieces of Θ.
    closed_round: the last round that was installed here.
    collected: where the leader pulls what it collects; None at the leader.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    plane: DataPlane,
    shard: int,
    answer: Callable[[object], None],
    crash: Callable[[BaseException], None],
  ):
    self.shard = shard
    self.model = OuterState(run_spec, shard)
    self.closed_round = 0
    self.collected: Publisher | None = None
    self._run_spec = run_spec
    self._plane = plane
    self._answer = answer
    self._crash = crash
    self._paces: dict[int, TransferPace] = {}  # By learner id.
    self._ends: dict[Key, PeerEnds] = {}
    self._lock = threading.Lock()  # Guards the next two fields.
    self._wanted: set[int] = set()  # Jobs of the pool.
    # By job: contributions, and copies of lost fragments, each with its
    # fragment.
    self._pulled: dict[int, tuple[int, payload_parts.Inspected | Arrays]] = {}
    self._outcomes: dict[int, OuterStep] = {}
    self._pulls = concurrent.futures.ThreadPoolExecutor(
      max_workers=run_spec.limits.pulls, thread_name_prefix='pull'
    )
    self._merger = Worker('merger', MERGES_MAX, crash)
    self._closer = Worker('closer', CLOSINGS_MAX, crash)

  def perform(self, order) -> object | None:
    """Executes an order of the leader; returns an answer known at once."""
    match order:
      case orders.Admit():
        return self._admit(order)
      case orders.Release():
        self._release((order.learner, order.incarnation))
      case orders.RetireParts():
        self._retire(order)
      case orders.PullPart():
        self._start(order)
      case orders.CancelPart():
        self._cancel(order.pull)
      case orders.MergePart():
        self._start_merge(order)
      case orders.InstallPart():
        self.model.install(order.fragment, self._outcomes[order.merge])
        self.closed_round = order.round
      case orders.OfferPart():
        return self._offer(order)
      case orders.GoOn():
        self._go_on(order)
      case _:
        raise TypeError(f'Not an order to a shard: {order!r}.')
    return None

  def hello(self, process: int) -> orders.ShardHello:
    """Returns the hello to a leader, whether a new process or not."""
    config, model = self._run_spec.config, self.model
    if self.collected is not None:
      self.collected.close()
    self.collected = self._plane.publisher('leader')
    outer = [model.outer_of(p) for p in model.owned]
    return orders.ShardHello(
      protocol=messages.PROTOCOL_VERSION,
      run=config.name,
      shard=self.shard,
      process=process,
      fingerprints=self._run_spec.fingerprints,
      fragments=model.owned,
      versions=tuple(model.versions()[p] for p in model.owned),
      crcs=tuple(model.piece_crcs(p) for p in model.owned),
      outer_versions=tuple(version for version, _ in outer),
      outer_crcs=tuple(crcs for _, crcs in outer),
      address=self.collected.address,
    )

  def forget(self):
    """Drops all sessions and jobs of the previous leader."""
    for key in list(self._ends):
      self._release(key)
    with self._lock:
      self._wanted.clear()
      self._pulled.clear()
    self._outcomes.clear()

  def close(self):
    """Ends sessions and threads."""
    for ends in self._ends.values():
      ends.close()
    self._pulls.shutdown(wait=False, cancel_futures=True)
    self._merger.close(1.0)
    self._closer.close(1.0)

  # Sessions -----------------------------------------------------------------

  def _admit(self, order: orders.Admit) -> orders.Admitted:
    key = order.learner, order.incarnation
    self._release(key)
    fetchers = []
    try:
      slice_map = read_slice_map(self._run_spec, order.partition)
      if len(order.addresses) != slice_map.hosts:
        raise ValueError(
          f'{len(order.addresses)} addresses, {slice_map.hosts} hosts'
        )
      for address in order.addresses:
        fetchers.append(self._plane.fetcher(address))
    except ValueError as error:  # Malformed, or does not resolve.
      logging.warning('learner %d is not admitted: %s', order.learner, error)
      for fetcher in fetchers:
        fetcher.close()
      return orders.Admitted(*key, ())
    name = f'learner {order.learner}'
    publishers = [self._plane.publisher(name) for _ in fetchers]
    self._ends[key] = ends = PeerEnds(publishers, fetchers, slice_map)
    # Kept beyond the session: the next one uses the same link.
    knob = self._run_spec.config.protocol.patience
    self._paces.setdefault(order.learner, TransferPace(knob))
    return orders.Admitted(*key, ends.addresses)

  def _release(self, key: Key):
    ends = self._ends.pop(key, None)
    # Not on this thread: it may wait for the peer's sockets.
    if ends is not None and not self._closer.submit(ends.close):
      ends.close()

  def _retire(self, order: orders.RetireParts):
    ends = self._ends.get((order.learner, order.incarnation))
    for handle in order.handles if ends else ():
      ends.retire(handle)

  # In -----------------------------------------------------------------------

  def _start(self, order: orders.PullPart):
    ends = self._ends.get((order.learner, order.incarnation))
    if ends is None:
      failed = orders.PartFailed(order.job, 'the session has ended', False)
      self._answer(failed)
    else:
      with self._lock:
        self._wanted.add(order.job)
      self._pulls.submit(self._guarded, order, ends)

  def _guarded(self, order: orders.PullPart, ends: PeerEnds):
    """Runs a job of the pool, unless it was cancelled before its turn.

    An error ends the process. The result of a job that was cancelled meanwhile
    is dropped, and the leader expects no answer.
    """
    if order.job not in self._wanted:
      return
    try:
      answer = (self._take if order.lost else self._pull)(order, ends)
    except (TransferFailed, payload_parts.Unusable) as error:
      reason = f'{type(error).__name__}: {error}'
      unusable = isinstance(error, payload_parts.Unusable)
      answer = orders.PartFailed(order.job, reason, unusable)
    except BaseException as error:  # noqa: BLE001 - handed on, not hidden.
      self._crash(error)
      return
    with self._lock:
      wanted = order.job in self._wanted
      self._wanted.discard(order.job)
    if wanted:
      self._answer(answer)

  def _pull(self, order: orders.PullPart, ends: PeerEnds) -> orders.PartPulled:
    """Pulls an outer gradient on the pool, fully checked."""
    v = self._pull_parts(order, ends, self._run_spec.up, payload.inspect)
    v, norm = payload_parts.checked(v)
    self._keep(order, v)
    return orders.PartPulled(order.job, norm)

  def _take(self, order: orders.PullPart, ends: PeerEnds) -> orders.PartTaken:
    """Pulls, on the pool, a learner's copy of a lost fragment."""
    theta = self._pull_parts(order, ends, self._run_spec.full)
    self._keep(order, theta)
    pieces = self._run_spec.layout.fragments[order.fragment]
    return orders.PartTaken(order.job, payload.piece_crcs(theta, pieces))

  def _pull_parts(
    self,
    order: orders.PullPart,
    ends: PeerEnds,
    codec: Codec,
    decode: Decode = payload.decode,
  ):
    """Pulls what each host of a learner has for this shard, and joins it."""
    return payload_parts.pull_parts(
      order.payload,
      order.fragment,
      self.shard,
      codec,
      ends.fetchers,
      ends.slice_map,
      self._paces[order.learner],
      decode,
    )

  def _keep(self, order: orders.PullPart, result):
    """Keeps the result of a job, unless it was cancelled."""
    with self._lock:
      if order.job in self._wanted:
        self._pulled[order.job] = order.fragment, result

  def _cancel(self, job: int):
    """Cancels a pull, whether queued, in progress or done."""
    with self._lock:
      self._wanted.discard(job)
      self._pulled.pop(job, None)

  # Merging ------------------------------------------------------------------

  def _start_merge(self, order: orders.MergePart):
    """Hands the contributions to the merge thread."""
    with self._lock:
      taken = {
        learner: self._pulled.pop(job)[1]
        for learner, job in zip(order.learners, order.pulls)
      }
    self._outcomes.clear()  # Left by a merge that was given up.
    weights = dict(zip(order.learners, order.weights))

    def merge():
      outcome = self.model.outer_step(order.fragment, taken, weights)
      self._outcomes[order.job] = outcome
      part = part_of(outcome.data)
      self._answer(orders.PartMerged(order.job, outcome.crcs, part))

    if not self._merger.submit(merge):
      raise RuntimeError(f'{MERGES_MAX} merges are waiting')

  def _offer(self, order: orders.OfferPart) -> orders.PartOffered:
    """Offers encoded bytes of Θ_p, cut for each session's hosts.

    Those for the leader are to be pulled once.
    """
    p, hosts = order.fragment, []
    if order.merge:
      codec, kept = self._run_spec.down, UPDATES_KEPT
      data = self._outcomes.pop(order.merge).data
    else:
      codec, kept = self._run_spec.full, 1
      _, data, _ = self.model.fragment(p)
      if not order.recipients:
        self.collected.offer(order.job, data)
    for to in order.recipients:
      ends = self._ends.get((to.learner, to.incarnation))
      if ends is None:
        continue
      parts = ends.slice_map.cut(data, p, self.shard, codec)
      ends.offer(kept, p, to.handle, parts)
      if not ends.slice_map.whole:
        theta = self.model.state(p).theta
        crcs = ends.slice_map.crcs(theta, p, self.shard)
        announced = tuple(part_of(part) for part in parts)
        hosts.append(
          orders.HostParts(to.learner, to.incarnation, announced, crcs)
        )
    return orders.PartOffered(order.job, part_of(data), tuple(hosts))

  def _go_on(self, order: orders.GoOn):
    theta = self._pulled[order.taken][1] if order.taken else None
    self.model.go_on(order.fragment, order.version, theta)
    with self._lock:  # Of a fragment that was lost nothing else is here.
      for job, (fragment, _) in list(self._pulled.items()):
        if fragment == order.fragment:
          del self._pulled[job]
