# SPDX-License-Identifier: Apache-2.0
"""A learner's way into a run, and the state it gives to a newcomer.

A process starts from its own checkpoint or with nothing. If the run has gone on
without it, a live peer gives it a copy of Θ and of its inner optimizer state;
without such a peer it continues from its own. Whatever is newer comes from the
syncer. Only where no round has closed yet does it draw the initial Θ itself.
"""

import dataclasses

from diloco.protocol import messages
from diloco.protocol.config import AUTO, CHECKPOINT, PEER
from diloco.protocol.learner import events as learner_events
from diloco.protocol.learner import updates
from diloco.protocol.learner.offers import min_ahead
from diloco.protocol.learner.state import Core, Fragment, LearnerState, View
from diloco.protocol.values import Value, replace_unchecked

# Versions of a fragment that have been announced since the welcome, when a
# newcomer that does not hold the newest of each is taken for slow.
OUTRUN_VERSIONS = 2


class Start(Value):
  """The state of a process when it starts; tuples are by fragment."""

  source: str  # Its origin, for humans.
  crcs: tuple[int, ...]  # CRCs of the bytes of Θ_p that the host holds,
  versions: tuple[int, ...]  # and versions of those fragments.
  # Own step, and own tokens, up to which θ_p has no progress of the learner.
  from_steps: tuple[int, ...]
  from_tokens: tuple[int, ...]
  step: int = 0  # Own inner steps so far, of this and of earlier processes.
  tokens: int = 0  # Of those steps.
  rows: int = 0  # Taken of the data shard.
  closed_round: int = 0  # The newest round known to be closed.
  global_step: int = 0  # t as last known.
  world: messages.World = dataclasses.field(default=messages.World())

  @classmethod
  def from_seed(cls, crcs: tuple[int, ...]) -> 'Start':
    zeros = (0,) * len(crcs)
    return cls('the seed', crcs, zeros, zeros, zeros)

  @classmethod
  def empty(cls, fragments: int) -> 'Start':
    """Returns the start of a process that holds nothing, and has not drawn."""
    return cls.from_seed((messages.NO_BYTES,) * fragments)

  def counting_anew(self) -> 'Start':
    """Returns a copy that counts progress on every fragment from here on.

    With the blend 'interpolate' a checkpoint does not say what part of θ is
    progress: whatever was not merged before stays in θ, and is not offered
    again.
    """
    count = len(self.versions)
    return dataclasses.replace(
      self, from_steps=(self.step,) * count, from_tokens=(self.tokens,) * count
    )

  def state(self) -> LearnerState:
    """Returns the machine's state before its first message."""
    fragments = tuple(
      Fragment(
        base=version,
        host=version,
        coming=version,
        announced=version,
        crc=crc,
        from_step=from_step,
        from_tokens=from_tokens,
      )
      for version, crc, from_step, from_tokens in zip(
        self.versions, self.crcs, self.from_steps, self.from_tokens, strict=True
      )
    )
    return LearnerState(
      fragments,
      source=self.source,
      step=self.step,
      tokens=self.tokens,
      completed_step=self.step,
      reported_step=self.step,
      rows=self.rows,
      closed_known=self.closed_round,
      view=View(self.global_step, self.step),
      world=self.world,
    )


def on_connected(core: Core, event: learner_events.Connected):
  """Sends the hello on a stream that has just opened."""
  core.set(incarnation=event.incarnation, in_session=True)
  fragments = core.state.fragments
  world = core.state.world
  if core.state.began:  # It is the same process as in the last session.
    world = replace_unchecked(world, reformed=False)
  core.send(
    messages.Hello(
      protocol=messages.PROTOCOL_VERSION,
      run=core.run,
      learner=core.learner,
      incarnation=event.incarnation,
      fingerprints=core.fingerprints,
      versions=tuple(f.host for f in fragments),
      crcs=tuple(f.crc for f in fragments),
      began=core.state.began,
      addresses=event.addresses,
      partition=event.partition,
      world=world,
      step=core.state.completed_step,
      rows=core.state.rows,
    )
  )


def on_welcome(core: Core, welcome: messages.Welcome):
  """Counts again after a reconnect, or starts to look for missing state."""
  state = core.state
  known = zip(state.fragments, welcome.versions)
  if any(fragment.host > version for fragment, version in known):
    # A fragment has arrived since the hello. A syncer that has lost its ledger
    # would send an older one: it must be told first.
    core.send(messages.Goodbye('knows of later rounds than its hello said'))
    return
  # This may be less than before, if a syncer has lost its ledger.
  closed = welcome.closed_round
  # Its clock will start so many steps after where it was. Not at τ = 0: it
  # might reach its boundary with fewer than s steps on that clock, and all
  # would wait there for a round that is not due.
  away = 0
  if core.config.overlap_steps:
    away = min(
      state.completed_step - state.reported_step, core.config.spacing_steps
    )
  view = replace_unchecked(
    state.view, step=welcome.step + away, own_step=state.completed_step
  )
  core.set(
    connected=True,
    give_up_at_s=None,
    closed_known=closed,
    last_offered=closed,  # Earlier offers are gone.
    offer_ahead_steps=min_ahead(core.config),
    view=view,
    reported=False,
  )
  for p, fragment in enumerate(state.fragments):
    announced = welcome.versions[p]
    core.set_fragment(
      p,
      coming=fragment.host,
      announced=announced,
      at_syncer=(announced, welcome.crcs[p]),
      # A CRC that no process knew is the learner's own, as its hello said it.
      unlike=welcome.clean
      or welcome.crcs[p] != fragment.crc
      or fragment.crc == messages.NO_BYTES,
      needed=announced,
      received=0,
      # An update that said more was lost with the syncer's ledger.
      merged_version=min(fragment.merged_version, announced),
      # Offers end with their session. Whether one was merged is said by the
      # update of a merge in progress, or by the full fragment.
      pulled=False,
    )
  if state.began:
    core.set(reported_step=state.completed_step)
    core.send(messages.Ready(away, state.source))
    _want_newer(core)
    return
  core.set(rows=max(state.rows, welcome.rows), clean=welcome.clean)
  if state.drawing:
    return  # `Drawn` goes on from here.
  if _is_empty(core) and not any(welcome.versions) and not welcome.clean:
    core.set(drawing=True)
    core.effects.append(learner_events.Draw())
    return
  # A peer's state is newer than one that the run has left behind, but for that
  # of slices, which was alive a moment ago.
  behind = (
    any(f.unlike for f in core.state.fragments)
    and not state.settled
    and not core.state.goes_on
  )
  if behind and welcome.live and core.bootstrap != CHECKPOINT:
    core.set(seeking=True)
    core.send(messages.WantState('joins a run that has gone on'))
  elif behind and core.bootstrap != PEER:
    _read_stored(core)
  else:
    go_on_alone(core)


def _is_empty(core: Core) -> bool:
  """Returns True if the process has no state at all, not even a drawn one."""
  return not core.state.settled and all(
    f.crc == messages.NO_BYTES for f in core.state.fragments
  )


def on_drawn(core: Core, event: learner_events.Drawn):
  """Begins from the initial Θ, or on devices that draw other bits from the
  syncer's.
  """
  core.set(drawing=False)
  if core.state.settled:
    return  # A donor's state, requested in an earlier session, came meanwhile.
  for p, crc in enumerate(event.crcs):
    fragment = core.state.fragments[p]
    unknown = fragment.at_syncer == (0, messages.NO_BYTES)
    unlike = not unknown and fragment.told_otherwise(0, crc)
    core.set_fragment(p, crc=crc, unlike=unlike)
  _settle(core, core.state.source)
  if core.state.connected:
    _want_newer(core)


def _read_stored(core: Core):
  core.set(seeking=True)
  core.effects.append(learner_events.ReadStored())


def on_nothing_stored(core: Core, event: learner_events.NothingStored):
  """Goes on alone: storage was the last place to look."""
  if core.state.seeking and core.state.connected:
    go_on_alone(core)


def go_on_alone(core: Core):
  """Continues from its own state and the syncer's Θ, without a donor."""
  if core.state.drawing:
    return
  if not core.state.settled:
    has_state = not (core.state.clean or _is_empty(core))
    _settle(core, core.state.source)
    if core.state.clean:
      core.set(source='nothing, after a quarantine')
    if not has_state:
      core.effects.append(learner_events.Reset())
  _want_newer(core)


def _settle(core: Core, source: str):
  core.set(seeking=False, fetching=None, settled=True, source=source)


def _want_newer(core: Core):
  """Asks the syncer for the fragments that the host does not hold."""
  for p, fragment in enumerate(core.state.fragments):
    if fragment.announced > fragment.host:
      updates.want(core, p, f'at version {fragment.host} on joining')
    elif fragment.unlike:
      reason = f'other bytes at version {fragment.host} on joining'
      updates.want(core, p, reason)


def on_state_at(core: Core, message: messages.StateAt):
  """Fetches what a donor has offered."""
  if core.state.seeking:
    core.set(fetching=message)
    core.effects.append(learner_events.FetchState(message))


def on_no_state(core: Core):
  """Goes on without a live donor: through storage, or alone."""
  if core.state.seeking and core.bootstrap == AUTO:
    _read_stored(core)
  elif core.state.seeking:
    go_on_alone(core)


def on_state_fetched(core: Core, event: learner_events.StateFetched):
  """Adopts a donor's state; newer fragments still come from the syncer.

  The session that asked for it may have ended meanwhile; the state is as good.
  Only where the syncer has gone on with other bytes of a version since, these
  are requested.
  """
  offered = event.offered
  for p, (version, crc) in enumerate(zip(offered.versions, offered.crcs)):
    fragment = core.state.fragments[p]
    core.set_fragment(
      p,
      host=version,
      coming=max(version, fragment.coming),
      crc=crc,
      applied=False,
      unlike=fragment.told_otherwise(version, crc),
    )
  if core.state.connected and not event.stored:
    core.send(messages.StateTaken())
  if core.state.settled:
    return  # It was told to go on alone meanwhile.
  where = 'in its checkpoint of' if event.stored else 'at its'
  _settle(core, f'learner {event.donor} {where} step {offered.step}')
  core.effects.append(learner_events.Adopt())
  if core.state.connected:
    _want_newer(core)


def on_state_failed(core: Core, event: learner_events.StateFailed):
  """Asks for another donor; the syncer notes the failed one.

  A fetch that began in an earlier session says nothing about the donor of now.
  """
  if event.state == core.state.fetching:
    core.set(fetching=None)
    core.send(messages.WantState(event.reason))


def begin_when_complete(core: Core) -> bool:
  """Says `Ready` once complete; returns True if training begins."""
  state = core.state
  if state.began or state.ceased or not state.connected or not state.settled:
    return False
  is_whole = state.goes_on or all(f.complete for f in state.fragments)
  if not is_whole and not _is_outrun(state):
    return False
  core.send(messages.Ready(0, state.source))
  updates.apply_received(core)
  core.set(began=True)
  return True


def _is_outrun(state: LearnerState) -> bool:
  """Returns True if versions come faster than the newcomer can fetch them.

  Then it begins with what it has, which is the syncer's, if not the newest;
  otherwise it never would.
  """
  fragments = state.fragments
  if not any(f.announced >= f.needed + OUTRUN_VERSIONS for f in fragments):
    return False
  return all(f.usable for f in fragments)


# Gives a learner's state to a newcomer, at one of the learner's boundaries.
#
# A learner donates once it has taken in every version that the newcomer must
# know, so that the copy fits the syncer's stream of updates, as in the
# paper's recovery.


def on_donate(core: Core, message: messages.Donate):
  """Notes the syncer's request; only a learner that trains may donate."""
  if not core.state.began or core.state.ceased:
    return  # The syncer picks another donor when this session ends.
  core.set(donations=(*core.state.donations, message))


def on_donation_over(core: Core, message: messages.DonationOver):
  """Ends a donation: the newcomer has it, is gone, or has another donor."""
  session = message.learner, message.incarnation
  core.set(
    donations=tuple(
      d for d in core.state.donations if (d.learner, d.incarnation) != session
    ),
    giving=None if core.state.giving == session else core.state.giving,
  )
  core.effects.append(learner_events.EndDonation(*session))


def donate(core: Core):
  """Donates one copy at a boundary, to the first newcomer that it can serve.

  There is at most one copy at a time, since each takes memory for a whole
  state, and none while the learner's bytes of some version differ from the
  syncer's.
  """
  fragments = core.state.fragments
  if core.state.giving is not None or any(f.unlike for f in fragments):
    return
  for donation in core.state.donations:
    if all(f.base >= v for f, v in zip(fragments, donation.versions)):
      rest = tuple(d for d in core.state.donations if d is not donation)
      core.set(donations=rest, giving=(donation.learner, donation.incarnation))
      core.effects.append(
        learner_events.DonateState(
          donation.learner,
          donation.incarnation,
          core.state.step,
          donation.partition,
        )
      )
      return
