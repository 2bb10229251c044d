# SPDX-License-Identifier: Apache-2.0
"""The bytes that each host of a learner moves, as the leading one tells it.

It offers contributions to the syncer and pulls updates. A donation to a
newcomer is the donor's copy of Θ in f32, fragment by fragment, and its inner
optimizer state, both at one of its boundaries. It has a publisher of its own,
which closes when the newcomer no longer needs it. Each host of the donor offers
to each host of the newcomer the boxes that the one has and the other needs,
whatever the two meshes: both know them from the partitions. Payloads are made
twice: one after another for their CRCs, and when they are pulled. So a donation
takes no memory but what holds the boundary, and a payload or two.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np
from absl import logging

from diloco.checkpoint.arrays import BrokenRecord, named
from diloco.checkpoint.learner_records import HeldState, LearnerRecords
from diloco.learner import host_parts
from diloco.learner.exchange_programs import ExchangePrograms, take_boxes
from diloco.learner.replica import (
  ArrivedFragment,
  FragmentReplica,
  Mismatch,
  Replica,
)
from diloco.metrics.workdir import Workdir, learner_name
from diloco.numerics import boxes, payload
from diloco.numerics.boxes import Box
from diloco.numerics.mesh_partition import Partition, Slice, passed_on
from diloco.protocol import host_messages, messages
from diloco.run import payload_parts
from diloco.run.payload_parts import TransferPace
from diloco.run.spec import RunSpec
from diloco.transport.data_plane import Closed, DataPlane, NotOffered, Publisher

Shares = Sequence[np.ndarray]  # uint8, by shard of the syncer.
Newcomer = tuple[int, int]  # (learner, incarnation).
OFFERS_MAX = 8  # Per fragment: offers that the syncer has not released.
# Of inner state: bounds what a lost pull costs. Of a small state it is a 64th.
CHUNK_BYTES_MIN, CHUNK_BYTES_MAX = 1 << 20, 1 << 26
INNER = 'inner'  # The inner state's codec: its raw bytes.
NOTHING = messages.Part(0, 0)
Chunk = list[tuple[str, Box, np.dtype]]  # Name of the leaf, box, dtype.
Make = Callable[[], np.ndarray]  # Returns the bytes of a payload, uint8.
OF_SESSIONS = (
  host_messages.SyncerAt,
  host_messages.ShardMoved,
  host_messages.CloseSession,
  host_messages.HostRetire,
)


class _Donation:
  """A donation to one newcomer, until it has pulled all or is gone.

  Args:
    publisher: the newcomer's.
    release: ends the hold on the boundary that the payloads are made from.
  """

  def __init__(self, publisher: Publisher, release: Callable[[], None]):
    self._publisher = publisher
    self._release = release
    self._lock = threading.Lock()
    self._over = False

  def offer(self, handle: int, make: Make) -> messages.Part:
    """Offers what `make` returns, now and when it is pulled."""
    part = payload_parts.part_of(make())
    if part.nbytes:
      self._publisher.offer(handle, lambda: self._made(make))
    return part

  def _made(self, make: Make) -> np.ndarray:
    with self._lock:
      if self._over:
        raise NotOffered('the donation is over')
      return make()

  def end(self):
    """Withdraws it all; waits for the payload that is being made."""
    self._publisher.close()
    with self._lock:
      self._over = True
    self._release()


class HostTransfer:
  """Moves the bytes of one host; the `take_…` methods are for its loop.

  Donations and what is encoded are for one worker, the rest for the other. What
  is done for an order raises `TransferFailed` where bytes did not come, and
  `Mismatch` where they are not what was announced.

  Args:
    programs: take fragments of Θ to the devices.
    replica: the host's copy of Θ.
    plane: the data plane.
    workdir: where peers save; None: that is not known.

  Attributes:
    replica: the host's copy of Θ.
    sessions: what it has on offer to the syncer, and pulls of it.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    programs: ExchangePrograms,
    replica: Replica,
    plane: DataPlane,
    workdir: Workdir | None = None,
  ):
    self.replica = replica
    self._workdir = workdir
    self.sessions = HostSessions(plane, run_spec.owners.shards, replica.host)
    self._programs = programs
    self._slices = programs.holding
    self._host = replica.host
    self._shards = run_spec.owners.shards
    self._run_spec = run_spec
    self._plane = plane
    self._pace = TransferPace(run_spec.config.protocol.patience)
    self._donations: dict[Newcomer, _Donation] = {}
    self._chunk_bytes = _chunk_bytes(programs.state_like)
    self._arrived: dict[tuple[int, int], ArrivedFragment] = {}
    # From a donor, until all hosts have theirs: Θ, and the inner state, which
    # then waits until the loop takes it.
    self._fetched: tuple[list[FragmentReplica], host_parts.Parts] | None = None
    self._adopted: host_parts.Parts | None = None

  # For the loop -------------------------------------------------------------

  def take_arrived(self, fragment: int, version: int) -> ArrivedFragment | None:
    """Returns the fragment to apply and forgets older ones.

    It is None if the version came twice and was applied before.
    """
    taken = self._arrived.pop((fragment, version), None)
    for key in list(self._arrived):
      if key[0] == fragment and key[1] < version:
        del self._arrived[key]
    if taken is not None and taken.device is None:
      placed = self._programs.put_fragment(fragment, taken.held.theta)
      taken = dataclasses.replace(taken, device=placed)
    return taken

  def take_adopted(self) -> host_parts.Parts | None:
    """Returns the inner state that a donor gave; None if there is none."""
    adopted, self._adopted = self._adopted, None
    return adopted

  # Out ----------------------------------------------------------------------

  def encode_delta(
    self,
    fragment: int,
    theta: Mapping[str, jax.Array],
    reference: Mapping[str, np.ndarray | jax.Array],
  ) -> Shares:
    """Returns the bytes of v = reference − θ; see `LocalDelta.reference`."""
    offered = self._slices.offered[fragment]
    own = take_boxes(offered, theta)
    if isinstance(next(iter(reference.values()), None), jax.Array):
      held = take_boxes(offered, reference)
    else:
      held = self._slices.offered_of(fragment, reference)
    codec = self._run_spec.up
    return tuple(
      payload_parts.encode(
        {box.name: held[box.name] for box in boxes}, own, boxes, codec
      )
      for boxes in self._by_shard(fragment)
    )

  def encode_held(self, fragment: int) -> Shares:
    """Returns the bytes of the host's copy of Θ_p, in f32."""
    _, theta = self.replica.fragment(fragment)
    held = self._slices.offered_of(fragment, theta)
    full = self._run_spec.full
    return tuple(
      payload.encode(held, boxes, full) for boxes in self._by_shard(fragment)
    )

  def donate(
    self,
    order: host_messages.DonateAt,
    held: Sequence[FragmentReplica],
    state: HeldState,
  ) -> tuple[str, tuple[messages.Part, ...]]:
    """Offers a newcomer this host's boxes of Θ and of the inner state.

    Args:
      held: Θ at the boundary, by fragment.
      state: the inner state at the boundary, released when the donation ends.

    Returns:
      Where it is pulled, and its payloads: P fragments, then the inner state;
      each as one payload for each host of the newcomer.
    """
    newcomer = order.learner, order.incarnation
    with contextlib.ExitStack() as unless_offered:
      unless_offered.callback(state.release)
      self.end_donations(newcomer)
      taker = payload_parts.read_partition(self._run_spec, order.partition)
      publisher = self._plane.publisher(f'newcomer {newcomer[0]}')
      unless_offered.pop_all()
    donation = self._donations[newcomer] = _Donation(publisher, state.release)
    parts_of_state = host_parts.to_host(state.inner_state)
    columns = [
      self._given(taker, other, held, parts_of_state)
      for other in range(taker.host_count)
    ]
    nothing = lambda: payload_parts.NOTHING  # noqa: E731
    rows = itertools.zip_longest(*columns, fillvalue=nothing)
    makes = zip(order.handles, itertools.chain.from_iterable(rows))
    return publisher.address, tuple(donation.offer(*each) for each in makes)

  def _given(
    self,
    taker: Partition,
    other: int,
    held: Sequence[FragmentReplica],
    state: host_parts.Parts,
  ) -> Iterator[Make]:
    """Yields what makes the payloads for one host of a newcomer."""
    ends = self._slices.partition, self._host, taker, other
    for p, copy in enumerate(held):
      slices = self._passed_on(p, *ends)
      yield functools.partial(self._of_theta, p, copy.theta, slices)
    for chunk in self._passed_on_of_state(*ends):
      yield functools.partial(_of_state, state, chunk)

  def _of_theta(self, fragment: int, theta, slices) -> np.ndarray:
    needed = self._slices.needed[fragment]
    arrays = payload_parts.read_slices(slices, needed, theta)
    return payload.encode(arrays, slices, self._run_spec.full)

  def _passed_on(self, fragment: int, *ends) -> tuple[Slice, ...]:
    """Returns the boxes of a fragment that one host gives to another.

    Args:
      *ends: giver, its host, taker and its host; see `passed_on`.
    """
    return tuple(
      Slice(piece, box)
      for piece in self._run_spec.layout.fragments[fragment]
      for box in passed_on(
        *ends, piece.shape, lambda who, piece=piece: who.piece_splits(piece)
      )
    )

  def _passed_on_of_state(self, *ends) -> list[Chunk]:
    """Returns the same of the inner state, by payload: donor and newcomer cut
    it alike.
    """
    chunks: list[Chunk] = []
    room = 0
    for name, like in named(self._programs.state_like).items():
      dtype, splits = np.dtype(like.dtype), self._programs.state_splits(name)
      most = max(1, self._chunk_bytes // dtype.itemsize)
      for box in passed_on(*ends, like.shape, splits):
        for part in boxes.cut(box, most):
          nbytes = boxes.size(part) * dtype.itemsize
          if nbytes > room:
            chunks.append([])
            room = self._chunk_bytes
          chunks[-1].append((name, part, dtype))
          room -= nbytes
    return chunks

  def end_donations(self, newcomer: tuple[int, ...] = ()):
    """Withdraws what was offered to a newcomer, if anything was, or to all."""
    for receiver in [newcomer] if newcomer else list(self._donations):
      donation = self._donations.pop(receiver, None)
      if donation is not None:
        donation.end()

  # In -----------------------------------------------------------------------

  def take(self, order: host_messages.HostTake):
    """Pulls this host's part into its copy and the devices'."""
    first = self._host * self._shards
    own = range(first, first + self._shards)
    data = self.sessions.fetchers(order.session).pull_each(
      [payload_parts.only(order.payload, i) for i in own], self._pace
    )
    take_in = self.replica.replace if order.full else self.replica.update
    crcs = order.part_crcs[first : first + self._shards]
    take_in(order.fragment, order.version, data, order.crc, crcs)
    self._put(order.fragment)

  def fetch(self, order: host_messages.HostFetch):
    """Pulls this host's boxes of a donor's state without adopting it."""
    self._fetched = None
    try:
      giver = payload_parts.read_partition(self._run_spec, order.partition)
    except ValueError as error:
      raise Mismatch(f'donor: {error}') from error
    own, hosts = self._slices.partition, len(order.addresses)
    wanted = order.payloads[self._host :: own.host_count]
    if hosts != giver.host_count or any(
      len(each.parts) != (hosts if hosts > 1 else 0) for each in wanted
    ):
      raise Mismatch(f'{hosts} hosts offer, the donor has {giver.host_count}')
    ends = [(giver, host, own, self._host) for host in range(hosts)]
    for host in range(hosts):
      self._check_donated(
        [payload_parts.only(each, host) for each in wanted], ends[host]
      )
    thetas = [
      {each.name: np.empty(each.shape, np.float32) for each in needed}
      for needed in self._slices.needed
    ]
    state = host_parts.empty(self._programs.state_like)
    for host, address in enumerate(order.addresses):
      self._take_boxes(
        address,
        [payload_parts.only(each, host) for each in wanted],
        ends[host],
        thetas,
        state,
      )
    self._hold(zip(order.versions, thetas, order.crcs, strict=True), state)

  def _hold(self, replicas: Iterable[tuple], state: host_parts.Parts):
    """Keeps what has come until all hosts have theirs."""
    if not is_finite(state):
      raise Mismatch("the donor's inner state is not finite")
    self._fetched = [FragmentReplica(*fields) for fields in replicas], state

  def stored(self, own: int) -> Iterator[tuple[int, int, Mapping]]:
    """Yields peer, step and progress of the newest checkpoints of all peers.

    The one that is furthest in the run comes first.
    """
    found = []
    for path in self._workdir.learner_checkpoints() if self._workdir else ():
      learner, meta = int(path.name.rpartition('-')[2]), None
      if learner != own:
        with contextlib.suppress(BrokenRecord):  # Of an earlier version.
          meta = self._records(learner).newest_meta()
      if meta is not None:
        progress = meta['progress']
        found.append((progress['global_step'], learner, progress))
    for _, learner, progress in sorted(found, key=lambda each: -each[0]):
      yield learner, progress['step'], progress

  def read(self, order: host_messages.ReadSaved):
    """Reads this host's boxes of a peer's checkpoint without adopting it."""
    self._fetched, programs = None, self._programs
    try:
      saved = self._records(order.learner).restore_state(
        programs.params_like,
        programs.state_like,
        dict(enumerate(programs.bases_like())),
        order.step,
      )
    except BrokenRecord as error:
      raise Mismatch(str(error)) from error
    if saved is None:
      raise Mismatch(f'the checkpoint of step {order.step} can not be read')
    progress, arrays = saved.meta['progress'], saved.arrays
    replicas = zip(
      progress['versions'],
      programs.restored_bases(arrays['bases']),
      progress['crcs'],
    )
    self._hold(replicas, host_parts.to_host(arrays['optimizer']))

  def _records(self, learner: int) -> LearnerRecords:
    return LearnerRecords(
      self._workdir.checkpoints(learner_name(learner)),
      learner,
      self._run_spec.fingerprints,
      1,
      logging.info,
      owned=False,
    )

  def _take_boxes(self, address: str, wanted, ends, thetas, state):
    """Pulls the boxes of one host of the donor into the arrays."""
    try:
      fetcher = self._plane.fetcher(address)
    except ValueError as error:
      raise Mismatch(f'donor at {address!r}: {error}') from error
    pulled = (
      self._pace.pull(fetcher, each) if each.nbytes else payload_parts.NOTHING
      for each in wanted
    )
    try:
      for p, theta in enumerate(thetas):
        slices, full = self._passed_on(p, *ends), self._run_spec.full
        held = payload_parts.held_boxes(self._slices.needed[p], theta)
        arrays = payload.decode(next(pulled), slices, full)
        for each in slices:
          boxes.write(held[each.piece.name], each.ranges, arrays[each.name])
      for chunk, data in zip(self._passed_on_of_state(*ends), pulled):
        start = 0
        for name, box, dtype in chunk:
          stop = start + boxes.size(box) * dtype.itemsize
          values = data[start:stop].view(dtype).reshape(boxes.shape(box))
          boxes.write(state[name], box, values)
          start = stop
    finally:
      fetcher.close()

  def end_fetch(self, taken: bool):
    """Makes what was fetched this host's copy, or discards it."""
    fetched, self._fetched = self._fetched, None
    if not taken:
      return
    replicas, state = fetched
    self.replica.adopt(replicas)
    for p, held in enumerate(self.replica.held()):
      self._arrived[p, held.version] = ArrivedFragment(p, held, None)
    self._adopted = state

  def _check_donated(self, payloads: Sequence[messages.Payload], ends):
    """Checks, before any byte is pulled, that a donor of this run would offer
    this.
    """
    full = self._run_spec.full
    expected = [
      (full.name, payload.payload_bytes(self._passed_on(p, *ends), full))
      for p in range(len(self._slices.needed))
    ]
    expected += [
      (INNER, sum(boxes.size(box) * dtype.itemsize for _, box, dtype in chunk))
      for chunk in self._passed_on_of_state(*ends)
    ]
    sizes = [(x.codec, x.nbytes) for x in payloads]
    # Other hosts of this learner may take more chunks.
    expected += [(INNER, 0)] * (len(sizes) - len(expected))
    if sizes != expected:
      inner, needed = (
        sum(nbytes for name, nbytes in each if name == INNER)
        for each in (sizes, expected)
      )
      raise Mismatch(
        f'{len(sizes)} payloads with {inner} bytes of inner state are offered; '
        f'this host takes {len(expected)} with {needed} bytes'
      )

  def _put(self, fragment: int):
    """Puts the host's copy of a fragment on the devices as well."""
    held = self.replica.held()[fragment]
    self._arrived[fragment, held.version] = ArrivedFragment(
      fragment, held, self._programs.put_fragment(fragment, held.theta)
    )

  def _by_shard(self, fragment: int):
    for shard in range(self._shards):
      yield self.replica.slice_map.offered(fragment, self._host, shard)


def payloads_max(run_spec: RunSpec, state_like, hosts: int) -> int:
  """Returns how many handles a donation can need, on any host.

  Args:
    hosts: of the newcomer.
  """
  # Any two chunks in sequence have more bytes than the largest.
  chunks = 2 * math.ceil(_nbytes(state_like) / _chunk_bytes(state_like)) + 1
  return hosts * (len(run_spec.layout.fragments) + chunks)


def _chunk_bytes(state_like) -> int:
  return min(CHUNK_BYTES_MAX, max(CHUNK_BYTES_MIN, _nbytes(state_like) // 64))


def _nbytes(tree) -> int:
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def announced(
  handles: Sequence[int],
  codec: str,
  of_theta: int,
  hosts: Sequence[Sequence[messages.Part]],
) -> tuple[messages.Payload, ...]:
  """Returns the payloads that announce all hosts' parts of a donation.

  Args:
    handles: the handles, the same for each host.
    codec: codec of Θ.
    of_theta: number of payloads with Θ; the rest is the inner state.
    hosts: what each host offers, from host 0 on, as `HostTransfer.donate` says.
  """
  rows = itertools.zip_longest(*hosts, fillvalue=NOTHING)
  return tuple(
    payload_parts.announced_parts(handle, codec if i < of_theta else INNER, row)
    for i, (handle, row) in enumerate(zip(handles, rows))
  )


def _of_state(state: host_parts.Parts, chunk: Chunk) -> np.ndarray:
  """Returns the bytes of a chunk."""
  arrays = (boxes.read(state[name], box, dtype) for name, box, dtype in chunk)
  flat = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in arrays)
  return np.concatenate([payload_parts.NOTHING, *flat])


def is_finite(state: host_parts.Parts) -> bool:
  """Returns True if no value of a host's copy is NaN or infinite."""
  return all(
    bool(np.isfinite(values).all())
    for leaf in state.values()
    for _, values in leaf
    if np.issubdtype(values.dtype, np.floating)
  )


class _HostSession:
  """The open ends of one session on one host."""

  def __init__(self, publishers: Sequence[Publisher]):
    self.publishers = tuple(publishers)
    self.fetchers: payload_parts.Fetchers | None = None
    self.unretired: dict[int, int] = {}  # Handle -> fragment.

  def close(self):
    fetchers = (self.fetchers,) if self.fetchers else ()
    for end in (*self.publishers, *fetchers):
      end.close()


class HostSessions:
  """One host's sessions with the syncer, by number; for any thread.

  Args:
    plane: makes publishers and fetchers.
    shards: S, the number of the syncer's shards.
    host: index of this host.
  """

  def __init__(self, plane: DataPlane, shards: int, host: int = 0):
    self._plane = plane
    self._host = host
    self._shards = shards
    self._lock = threading.Lock()
    self._open: dict[int, _HostSession] = {}

  def open(self, session: int) -> tuple[str, ...]:
    """Opens publishers for a new session; returns their addresses by shard."""
    opened = _HostSession(
      [self._plane.publisher('syncer') for _ in range(self._shards)]
    )
    with self._lock:
      self._open[session] = opened
    return tuple(publisher.address for publisher in opened.publishers)

  def perform(self, order):
    """Performs one of `OF_SESSIONS`; nothing if the session has ended."""
    session = self._session(order.session)
    if session is None:
      return
    match order:
      case host_messages.SyncerAt():
        before, first = session.fetchers, self._host * self._shards
        own = order.addresses[first : first + self._shards]
        session.fetchers = payload_parts.Fetchers(self._plane, own)
        if before is not None:
          before.close()
      case host_messages.ShardMoved():
        if session.fetchers is not None:
          session.fetchers.move(order.shard, order.addresses[self._host])
      case host_messages.CloseSession():
        with self._lock:
          self._open.pop(order.session, None)
        session.close()
      case host_messages.HostRetire():
        for handle in order.handles:
          session.unretired.pop(handle, None)
          for publisher in session.publishers:
            publisher.retire(handle)

  def has_room(self, session: int, fragment: int) -> bool:
    """Returns True if one more offer of the fragment may be made.

    A stopped syncer releases nothing: offers to it must not fill this host, and
    what it finds when it resumes must still be there to be pulled.
    """
    opened = self._session(session)
    if opened is None:
      return False
    return list(opened.unretired.values()).count(fragment) < OFFERS_MAX

  def offer(
    self, session: int, fragment: int, handle: int, shares: Shares
  ) -> tuple[messages.Part, ...]:
    """Offers each shard its part; returns what is on offer.

    Raises:
      Closed: the session has ended.
    """
    opened = self._session(session)
    if opened is None:
      raise Closed('the session has ended')
    for publisher, data in zip(opened.publishers, shares, strict=True):
      if data.size:
        publisher.offer(handle, data)
    opened.unretired[handle] = fragment
    return tuple(map(payload_parts.part_of, shares))

  def fetchers(self, session: int) -> payload_parts.Fetchers:
    """Returns what pulls in a session; raises `Closed` if it has ended."""
    opened = self._session(session)
    if opened is None or opened.fetchers is None:
      raise Closed('the session has ended')
    return opened.fetchers

  def close(self):
    for session in list(self._open):
      self.perform(host_messages.CloseSession(session))

  def _session(self, session: int) -> _HostSession | None:
    with self._lock:
      return self._open.get(session)
