# SPDX-License-Identifier: Apache-2.0
"""One process of a learner in a simulated cluster, around the real machine.

Its loop has the order of `diloco.learner.train_loop`, where it is documented:
with τ > 0, boundary n comes as step n *begins* on the devices, and what is
copied there can be encoded once step n is done.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from diloco.protocol import messages
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner.bootstrap import Start
from diloco.protocol.learner.machine import Learner
from diloco.simulator.contents import FINGERPRINTS, RUN, Carried
from diloco.simulator.engine import Alarm, InnerSteps
from diloco.simulator.network import SYNCER, Cargo

SESSION_BITS = 12  # In an incarnation; the rest is the process number.
RISES_MAX = 8  # How often it takes a newer number, as in a run.
OFFERS_MAX = 8  # Per fragment, not released by the syncer; as in a run.
ONE_SLICE = messages.World()
OTHER_HANDLES = 1 << 40  # First handle of payloads that are not offers.


class PullQueue:
  """One thread's pulls: a learner makes one at a time, in turn.

  Args:
    process: the learner's process, whose pulls end with it.
    cluster: the cluster that it is part of.
  """

  def __init__(self, process, cluster):
    self._process = process
    self._cluster = cluster
    self._waiting: collections.deque[Callable[[], None]] = collections.deque()

  def add(
    self,
    source: int,
    cargo: Cargo,
    fragment: int,
    arrived: Callable[[], Sequence[learner_events.Event]],
    wanted: Callable[[], bool] = lambda: True,
    begins: Sequence[Callable[[], None]] = (),
  ):
    """Queues a pull; the process handles what `arrived` returns then.

    Args:
      wanted: asked when its turn comes; False drops it.
      begins: called as the pull of each piece begins, if there are any: the
        pieces are those of one pull, or several pulls at one go.
    """
    sim, wires = self._cluster.sim, self._cluster.wires
    missing = len(begins) or wires.pieces(cargo)

    def arrive():
      nonlocal missing
      missing -= 1
      if self._process.gone:
        self._waiting.clear()
      elif missing:
        pull_a_piece()
      else:
        self._end()
        for event in arrived():
          self._process.handle(event)

    def pull_a_piece():
      target = self._process.id
      if begins:
        begins[-missing]()
      when_s = wires.arrival_s(sim.now, source, target, cargo, fragment)
      sim.at(when_s, lambda: self._process.when_it_runs(arrive))

    def begin():
      if wanted():
        pull_a_piece()
      else:
        self._end()

    self._waiting.append(begin)
    if len(self._waiting) == 1:
      begin()

  def _end(self):
    self._waiting.popleft()
    if self._waiting:
      self._waiting[0]()


class SimulatedLearner:
  """The machine, its host's copy of Θ, its offers.

  Args:
    cluster: the cluster that it is part of.
    saved: its own checkpoint, or a boundary of its slices; None: it holds
      nothing.
    contents: the contents saved with it.
    world: its slices.

  Attributes:
    handed_on: True if the next process went on from a boundary of this one.
  """

  def __init__(
    self,
    cluster,
    learner: int,
    saved: Start | None = None,
    contents: Any = None,
    world: messages.World = ONE_SLICE,
  ):
    first_crcs = cluster.contents.first_crcs
    # What it would draw is there already, though its machine knows nothing.
    start = saved or Start.from_seed(first_crcs)
    known = dataclasses.replace(
      saved or Start.empty(len(first_crcs)), world=world
    )
    self.id = learner
    self.incarnation = 0
    self.process = cluster.process_number(learner)  # Process number.
    self.alive = True
    self.saved_step = 0  # Step of its own newest checkpoint.
    self.online = False  # A stream is open, as far as it knows.
    self.stopped = False
    self.stretch = 1.0  # Factor on the norms of what it offers.
    self.unusable = False  # What it offers is unusable.
    self.capacity = 1.0  # Share of its slices that are present.
    self.first_step = self.steps = start.step
    self.tokens = start.tokens
    self.rows = start.rows
    self.world = world
    self.handed_on = False
    self.copy_steps = cluster.options.slice_copy_steps
    self.batch = cluster.batch_of(learner) * world.slices
    self.stepped_at = start.global_step  # t, as the newest step knew it.
    self.training = False
    self.left: learner_events.Leave | None = None
    self.contents = cluster.contents.learner(learner, start, contents)
    self.machine = Learner(cluster.config, RUN, learner, FINGERPRINTS, known)
    self.offers: dict[int, int | None] = {}  # The fragment, by handle.
    # Offers to newcomers.
    self.donations: dict[tuple[int, int], messages.StateOffered] = {}
    # To be withdrawn by the encoding thread, which may wait for a step.
    self.withdrawn: set[tuple[int, int]] = set()
    self.started_s = cluster.sim.now
    self._cluster = cluster
    self._sessions = 0
    self._rises = RISES_MAX  # Until it is admitted.
    self._unread: list[Callable[[], None]] = []  # While it is stopped.
    # Of the encoding thread: the incarnation, the step after which its input
    # is available, and the job.
    self._jobs: collections.deque[tuple[int, int, Callable[[], None]]] = (
      collections.deque()
    )
    self._encoding = False  # The first of them is in progress.
    # Of the step under way: its tokens, the rows after it, its loss.
    self._dispatched: tuple[int, int, float] | None = None
    self._progress = 0  # Schedule argument of the next step.
    # Boundaries of a learner of several slices, the newer one last.
    self._noted: list[tuple[Start, Any]] = []
    if world.reformed:
      self._noted.append((known, contents))
    self._pulls = PullQueue(self, cluster)
    self._state_wanted: messages.StateAt | None = None
    self._alarm = Alarm(
      cluster.sim,
      lambda: None if self.gone else self.machine.deadline(),
      lambda: self.handle(learner_events.Tick()),
      self.when_it_runs,
    )
    self._inner = InnerSteps(cluster.sim, self.when_it_runs, self._stepped)

  # The process --------------------------------------------------------------

  @property
  def now(self) -> float:
    return self._cluster.sim.now

  @property
  def gone(self) -> bool:
    """True if it is dead or has left: another may take its place."""
    return not self.alive or self.left is not None

  def when_it_runs(self, callback: Callable[[], None]):
    """Calls back now; if stopped, when it resumes; if dead, never."""
    if self.stopped:
      self._unread.append(callback)
    else:
      callback()

  def resume(self):
    self.stopped = False
    unread, self._unread = self._unread, []
    for callback in unread:
      callback()

  def connect(self):
    """Opens a session; messages of an older one are void."""
    if self.gone:
      return
    if not self._cluster.reaches_syncer(self.id):
      self._connect_later()
      return
    self.online = True
    self._sessions += 1
    self.incarnation = self._cluster.next_incarnation(
      self.process, self._sessions
    )
    self.offers.clear()
    self.donations.clear()
    self.withdrawn.clear()
    addresses = (f'learner-{self.id}',)
    partition = self._cluster.partitions.get(self.id, '')
    self.handle(
      learner_events.Connected(self.incarnation, addresses, partition)
    )

  def disconnect(self, reason: str, incarnation: int):
    """Notes that a stream is closed, unless a newer one is open."""
    if not self.gone and self.online and incarnation == self.incarnation:
      self.online = False
      self.handle(learner_events.Disconnected(reason))
      self._connect_later()

  def _connect_later(self):
    self._cluster.sim.after(
      self._cluster.timing.reconnect_s, lambda: self.when_it_runs(self.connect)
    )

  # The machine --------------------------------------------------------------

  def receive(self, message):
    """Handles a message of the syncer; a refusal may be due to the clock."""
    match message:
      case messages.Refusal(newest=newest) if newest >= 0 and self._rises:
        self._rises -= 1
        newer = (newest >> SESSION_BITS) + 1
        self.process = max(self.process, newer)
        return  # The syncer ends the session; the next one is newer.
      case messages.Welcome():
        self._rises = 0
    self.handle(learner_events.Heard(message))

  def handle(self, event: learner_events.Event):
    """Passes an event to the machine and performs its effects."""
    if self.gone:
      return
    effects = self.machine.handle(event, self._cluster.sim.now)
    self._cluster.observer.at_learner(self, event, effects)
    for effect in effects:
      self._perform(effect)
    self._alarm.set()
    self._step_on()

  # Inner steps --------------------------------------------------------------

  def pause(self):
    """Suspends steps until `go_on`; messages are answered."""
    self._inner.suspend()

  def go_on(self):
    self._inner.resume()

  @property
  def in_step(self) -> bool:
    """True if a step is in progress, or waits for a round at its end."""
    waits = self.training and self.machine.waiting
    return not self.gone and (self._inner.running or waits)

  @property
  def _overlaps(self) -> bool:
    return self._cluster.config.overlap_steps > 0

  def _step_on(self):
    """Starts the next inner step unless one runs or the loop must wait."""
    idle = self.training and not self._inner.running
    if not idle or self.machine.waiting or self.gone or self._cluster.resting:
      return
    self._inner.start(self._cluster.draw_step_s(self.id))
    if self._overlaps:
      self._boundary()

  def _boundary(self):
    """Makes the step of this boundary, and does what is due there."""
    rows = round(self.capacity * self.batch)
    tokens = rows * self._cluster.options.row_tokens
    self.stepped_at = self._progress
    loss = self.contents.step(self.rows, self.stepped_at)
    self.rows += rows
    self.tokens += tokens
    self._dispatched = tokens, self.rows, loss
    self.handle(learner_events.Boundary(tokens))
    self._progress = self.machine.global_step
    step = self.machine.snapshot().step
    if self.world.of > 1 and step % self.copy_steps == 0:
      self._noted = [*self._noted[-1:], self._at_boundary("its slices' memory")]

  def _stepped(self, step_s: float, spans: list[tuple[float, float]]):
    """Notes a step that the devices have finished."""
    if self.gone:
      return
    self.steps += 1
    if not self._overlaps:
      self._progress = self.machine.global_step
      self._boundary()
    tokens, rows, loss = self._dispatched
    self._cluster.observer.stepped(self, spans, tokens)
    every = self._cluster.options.checkpoint_steps
    if every is not None and self.steps % every == 0:
      self.save()
    self._encode_next()
    outcome = tokens, rows, step_s, 0.0, loss
    self.handle(learner_events.Completed(*outcome))

  def save(self):
    """Saves its own checkpoint."""
    saved = self._at_boundary('its checkpoint')
    self._cluster.saved[self.id] = saved
    self.saved_step = saved[0].step

  def held(self) -> tuple[Start, Any] | None:
    """Returns the newest boundary that its devices have computed, if any."""
    whole = [x for x in self._noted if x[0].step <= self.steps]
    return whole[-1] if whole else None

  def _at_boundary(self, where: str) -> tuple[Start, Any]:
    """Returns all that belongs to this boundary."""
    state = self.machine.snapshot()
    start = Start(
      source=f'{where} of step {state.step}',
      crcs=tuple(self.contents.base_crcs),
      versions=tuple(f.base for f in state.fragments),
      from_steps=tuple(f.from_step for f in state.fragments),
      from_tokens=tuple(f.from_tokens for f in state.fragments),
      step=state.step,
      tokens=state.tokens,
      rows=self.rows,
      closed_round=state.closed_known,
      global_step=state.global_step,
    )
    return start, self.contents.save()

  # Effects ------------------------------------------------------------------

  def _perform(self, effect: learner_events.Effect):
    cluster = self._cluster
    match effect:
      case learner_events.Send():
        cluster.to_syncer(self, effect.message)
      case learner_events.Snapshot():
        copy = self.contents.snapshot(effect)
        self._later(lambda: self._offer(effect, copy), copied=True)
      case learner_events.HandIn():
        handed_in = messages.HandedIn(effect.last_round)
        self._later(lambda: cluster.to_syncer(self, handed_in))
      case learner_events.SayLeaving():
        self._later(lambda: cluster.to_syncer(self, messages.Leaving()))
      case learner_events.DonateState():
        self._donate(effect)
      case learner_events.EndDonation():
        self._end_donation((effect.learner, effect.incarnation))
      case learner_events.DonateFragment():
        self._later(lambda: self._donate_fragment(effect.fragment))
      case learner_events.FetchState():
        self._fetch_state(effect.state)
      case learner_events.FetchUpdates():
        self._fetch(effect.updates, Cargo.UPDATE, self.contents.update)
      case learner_events.FetchFragment():
        fetch = (effect.message,), Cargo.FRAGMENT, self.contents.replace
        self._fetch(*fetch)
      case learner_events.Forget():
        self._forget(effect.handles)
      case learner_events.Begin():
        self.training = True
        self.rows = effect.rows
        self._progress = self.machine.global_step
      case learner_events.Save():
        self.save()
      case learner_events.Cease():
        self.training = False
      case learner_events.Leave():
        self.left = effect
        cluster.lost(self, effect.reason)
      case learner_events.Apply():
        self.contents.apply(effect, self.training)
      case learner_events.Adopt():
        self.contents.adopt_inner()
      case learner_events.Draw():
        self.handle(learner_events.Drawn(cluster.contents.first_crcs))
      case learner_events.Reset():
        self.contents.reset_inner()
      case _:
        raise TypeError(f'Not a learner effect: {effect!r}.')

  def _forget(self, handles: tuple[int, ...] | None):
    if handles is None:
      self.offers.clear()
      self.donations.clear()
      return
    for handle in handles:
      self.offers.pop(handle, None)

  def _later(self, do: Callable[[], None], copied: bool = False):
    """Queues work; `copied`: its input is copied at this boundary."""
    waits = copied and self._overlaps
    of_step = self.machine.snapshot().step if waits else 0
    self._jobs.append((self.incarnation, of_step, do))
    self._encode_next()

  def _encode_next(self):
    """Begins the next job, unless it waits for its step."""
    waits = not self._jobs or self._jobs[0][1] > self.steps
    if self._encoding or waits:
      return
    incarnation, _, do = self._jobs.popleft()
    self._encoding = True

    def encoded():
      self._encoding = False
      if not self.gone and self.incarnation == incarnation:
        do()
      self._encode_next()

    self._cluster.sim.after(
      self._cluster.timing.encode_s, lambda: self.when_it_runs(encoded)
    )

  def _offer(self, snapshot: learner_events.Snapshot, copy: Any):
    if list(self.offers.values()).count(snapshot.fragment) >= OFFERS_MAX:
      # The syncer is stopped; it will find these.
      self.handle(
        learner_events.OfferDropped(snapshot.fragment, snapshot.handle)
      )
      return
    data = self.contents.offer(snapshot, copy)
    nbytes = self._cluster.wires.offer_bytes(snapshot.fragment)
    payload = Carried(snapshot.handle, 'up', nbytes, 0, data=data)
    self.offers[snapshot.handle] = snapshot.fragment
    self._cluster.to_syncer(self, snapshot.offer(payload))

  def _donate(self, effect: learner_events.DonateState):
    """Offers the host's Θ and the inner state at this boundary."""
    donated = self.contents.donate()
    payloads = tuple(
      Carried(self._cluster.next_handle(), 'f32', 1, 0, data=donated)
      for _ in self.contents.versions
    )
    offered = messages.StateOffered(
      learner=effect.learner,
      incarnation=effect.incarnation,
      versions=tuple(self.contents.versions),
      crcs=tuple(self.contents.crcs),
      step=effect.step,
      payloads=payloads,
      address=f'learner-{self.id}',
      partition=self._cluster.partitions.get(self.id, ''),
    )

    def offer():
      self.donations[effect.learner, effect.incarnation] = offered
      self._cluster.to_syncer(self, offered)

    self._later(offer, copied=True)

  def _end_donation(self, session: tuple[int, int]):
    self.withdrawn.add(session)

    def end():
      self.donations.pop(session, None)
      self.withdrawn.discard(session)

    self._later(end)

  def _donate_fragment(self, p: int):
    if self._cluster.loss and self._cluster.fails():
      lost = messages.NoFragment(p, 'a host has lost the syncer')
      self._cluster.to_syncer(self, lost)
      return
    data = self.contents.fragment(p)
    handle = OTHER_HANDLES + self._cluster.next_handle()
    payload = Carried(handle, 'f32', 1, 0, data=data)
    self.offers[payload.handle] = None  # It is not for a round.
    version = self.contents.versions[p]
    offered = messages.FragmentOffered(
      p, version, payload, self.contents.crcs[p]
    )
    self._cluster.to_syncer(self, offered)

  # Fetches ------------------------------------------------------------------

  def _fetch_state(self, state: messages.StateAt):
    """Fetches a donor's Θ, which replaces the host's on arrival."""

    def fetched() -> learner_events.Event:
      donor = self._cluster.learners[state.donor]
      offered = state.offered
      session = offered.learner, offered.incarnation
      here = self._cluster.reaches(state.donor, state.incarnation)
      reached = self._cluster.is_reached(self.id)
      if not reached or self._cluster.fails() or not here:
        return learner_events.StateFailed(state, 'lost on the way')
      if donor.donations.get(session) is not offered:
        return learner_events.StateFailed(state, 'not offered')
      self.contents.adopt(offered, offered.payloads[0].data)
      return learner_events.StateFetched(offered, state.donor)

    self._state_wanted = state
    wanted = lambda: state is self._state_wanted  # noqa: E731
    self._pulls.add(state.donor, Cargo.STATE, 0, lambda: [fetched()], wanted)

  def _fetch(
    self,
    announced: Sequence[messages.Update | messages.FullFragment],
    cargo: Cargo,
    take_in: Callable[[int, int, Any, int], str | None],
  ):
    """Pulls what the syncer has announced, and takes in one after another."""
    syncer, session = self._cluster.syncer, (self.id, self.incarnation)
    withdrawn: set[int] = set()  # Versions that were, when their turn came.

    def look(message):
      if not syncer.offers(session, message.fragment, message.payload.handle):
        withdrawn.add(message.version)

    def why_not(message) -> str | None:
      up = syncer.alive and not syncer.stopped
      here = up and self._cluster.is_reached(self.id)
      here = here and message.payload.order()
      if not here or self._cluster.fails():
        return 'lost on the way'
      if message.version in withdrawn:
        return 'not offered'
      p, version = message.fragment, message.version
      return take_in(p, version, message.payload.data, message.crc)

    def arrived() -> list[learner_events.Event]:
      events, last = [], announced[-1]
      for message in announced:
        p, version = message.fragment, message.version
        reason = why_not(message)
        if reason is not None:
          failed = learner_events.FetchFailed(p, last.version, reason)
          return [*events, failed]
        events = [learner_events.Rebuilt(p, version, message.crc)]
      return events

    begins = [functools.partial(look, message) for message in announced]
    fragment = announced[0].fragment
    self._pulls.add(SYNCER, cargo, fragment, arrived, begins=begins)
