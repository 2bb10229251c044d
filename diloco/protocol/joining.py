# SPDX-License-Identifier: Apache-2.0
"""A learner's way into a run: hello, welcome, bootstrap, ready.

A process starts from its seed or its own checkpoint. If the run has gone on
without it, a live peer gives it a copy of Θ and of its inner optimizer state;
without such a peer it continues from its own. Whatever is newer comes from the
syncer.
"""

import dataclasses

from diloco.protocol import learner_io, messages, receiving
from diloco.protocol.learner_state import Core, Fragment, State
from diloco.protocol.offering import View, lead_min
from diloco.protocol.values import changed


@dataclasses.dataclass(frozen=True)
class Start:
  """What a process holds when it starts; tuples are by fragment.

  Attributes:
    source: origin of the state, for humans.
    crcs: CRCs of the bytes of Θ_p that the host holds.
    versions: versions of those fragments.
    from_steps: own step up to which θ_p contains no progress of the learner.
    from_tokens: own tokens up to which θ_p contains no progress.
    step: own inner steps so far, of this and of earlier processes.
    tokens: tokens of those steps.
    position: index of the next batch of the data shard.
    closed_round: the newest round known to be closed.
    global_step: t as last known.
  """

  source: str
  crcs: tuple[int, ...]
  versions: tuple[int, ...]
  from_steps: tuple[int, ...]
  from_tokens: tuple[int, ...]
  step: int = 0
  tokens: int = 0
  position: int = 0
  closed_round: int = 0
  global_step: int = 0

  @classmethod
  def from_seed(cls, crcs: tuple[int, ...]) -> 'Start':
    zeros = (0,) * len(crcs)
    return cls('the seed', crcs, zeros, zeros, zeros)

  def counting_anew(self) -> 'Start':
    """Returns a copy that counts progress on every fragment from here on.

    With the blend 'mix' a checkpoint does not say what part of θ is progress:
    whatever was not merged before stays in θ, and is not offered again.
    """
    count = len(self.versions)
    return dataclasses.replace(
      self, from_steps=(self.step,) * count, from_tokens=(self.tokens,) * count
    )

  def state(self) -> State:
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
    return State(
      fragments,
      source=self.source,
      step=self.step,
      tokens=self.tokens,
      completed_step=self.step,
      reported_step=self.step,
      position=self.position,
      closed_known=self.closed_round,
      view=View(self.global_step, self.step),
    )


def on_connected(core: Core, event: learner_io.Connected):
  """Sends the hello on a stream that has just opened."""
  core.set(incarnation=event.incarnation, in_session=True)
  fragments = core.state.fragments
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
  view = changed(
    state.view, step=welcome.step + away, own_step=state.completed_step
  )
  core.set(
    connected=True,
    give_up_at_s=None,
    closed_known=closed,
    last_offered=closed,  # Earlier offers are gone.
    lead=lead_min(core.config),
    view=view,
    reported=False,
  )
  for p, fragment in enumerate(state.fragments):
    announced = welcome.versions[p]
    core.set_fragment(
      p,
      coming=fragment.host,
      announced=announced,
      unlike=welcome.clean or welcome.crcs[p] != fragment.crc,
      # Offers end with their session. Whether one was merged is said by the
      # update of a merge in progress, or by the full fragment.
      pulled=False,
    )
  if state.began:
    core.set(reported_step=state.completed_step)
    core.send(messages.Ready(away, state.source))
    _want_newer(core)
    return
  core.set(position=max(state.position, welcome.position), clean=welcome.clean)
  # A peer's state is newer than one that the run has left behind.
  behind = any(f.unlike for f in core.state.fragments)
  if behind and welcome.live and not state.settled:
    core.set(seeking=True)
    core.send(messages.WantState('joins a run that has gone on'))
    return
  go_on_alone(core)


def go_on_alone(core: Core):
  """Continues from its own state and the syncer's Θ, without a donor."""
  if not core.state.settled:
    _settle(core, core.state.source)
    if core.state.clean:
      core.set(source='nothing, after a quarantine')
      core.effects.append(learner_io.Reset())
  _want_newer(core)


def _settle(core: Core, source: str):
  core.set(seeking=False, settled=True, source=source)


def _want_newer(core: Core):
  """Asks the syncer for the fragments that the host does not hold."""
  for p, fragment in enumerate(core.state.fragments):
    if fragment.announced > fragment.host:
      receiving.want(core, p, f'at version {fragment.host} on joining')
    elif fragment.unlike:
      reason = f'other bytes at version {fragment.host} on joining'
      receiving.want(core, p, reason)


def on_state_at(core: Core, message: messages.StateAt):
  """Fetches what a donor has offered."""
  if core.state.seeking:
    core.effects.append(learner_io.FetchState(message))


def on_no_state(core: Core):
  """Goes on alone, as no donor is left."""
  if core.state.seeking:
    go_on_alone(core)


def on_state_fetched(core: Core, event: learner_io.StateFetched):
  """Adopts a donor's state; newer fragments still come from the syncer.

  The session that asked for it may have ended meanwhile; the state is as good.
  """
  offered = event.offered
  for p, (version, crc) in enumerate(zip(offered.versions, offered.crcs)):
    core.set_fragment(
      p,
      host=version,
      coming=max(version, core.state.fragments[p].coming),
      crc=crc,
      applied=False,
      unlike=False,
    )
  if core.state.connected:
    core.send(messages.StateTaken())
  if core.state.settled:
    return  # It was told to go on alone meanwhile.
  _settle(core, f'learner {event.donor} at its step {offered.step}')
  core.effects.append(learner_io.Adopt())
  if core.state.connected:
    _want_newer(core)


def on_state_failed(core: Core, event: learner_io.StateFailed):
  """Asks for another donor; the syncer notes the failed one."""
  if core.state.seeking and core.state.connected:
    core.send(messages.WantState(event.reason))


def begin_when_complete(core: Core) -> bool:
  """Says `Ready` once complete; returns True if training begins."""
  state = core.state
  if state.began or state.ceased or not state.connected or not state.settled:
    return False
  if not all(f.complete for f in state.fragments):
    return False
  core.send(messages.Ready(0, state.source))
  receiving.apply_received(core)
  core.set(began=True)
  return True
