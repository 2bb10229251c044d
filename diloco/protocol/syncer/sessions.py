# SPDX-License-Identifier: Apache-2.0
"""The syncer's sessions: hello, reports, silence, and how a session ends.

A message that breaks the protocol ends its session (`break_off`); the module
that owns its subject says why.
"""

import math

from diloco.protocol import messages, outliers, timeouts
from diloco.protocol.syncer import bootstrap as syncer_bootstrap
from diloco.protocol.syncer import events as syncer_events
from diloco.protocol.syncer import offers, recovery
from diloco.protocol.syncer.state import (
  LearnerAccount,
  Member,
  Stage,
  SyncerState,
)
from diloco.protocol.values import Ema, replace_unchecked

STEP_JUMP_MAX = 4.0  # One slow step changes ξ_step by no more than this factor.
STEP_S_MAX = 3600.0  # Longer first steps are not believed.


def on_hello(state: SyncerState, hello: messages.Hello):
  """Accepts a learner, or refuses it with the reason."""
  if state.is_current(hello.learner, hello.incarnation):
    # The live session is not at fault and must not be dropped.
    state.record('refused', hello.learner, 'a second hello while it lives')
    return
  account = state.accounts.get(hello.learner, LearnerAccount())
  if never := why_refused(state, hello):
    _refuse(state, hello, never, final=True)
    return
  if reason := why_not_now(hello, account):
    old = hello.incarnation <= account.incarnation
    newest = account.incarnation if old else -1
    _refuse(state, hello, reason, final=False, newest=newest)
    return
  if hello.learner in state.members:
    end_session(state, hello.learner, 'a newer incarnation took its place')
  if recovery.knows_more(state, hello):
    for learner in sorted(state.members):
      reason = f'was told of less than learner {hello.learner} knows'
      end_session(state, learner, reason)
    known = enumerate(zip(hello.versions, hello.crcs))
    recovery.adopt(state, hello.learner, dict(known))
  state.accounts[hello.learner] = replace_unchecked(
    account, incarnation=hello.incarnation
  )
  state.members[hello.learner] = Member(
    hello.incarnation,
    heard_s=state.now,
    silent_at_s=state.now + timeouts.silence_floor_s(state.config.patience),
    versions=hello.versions,
    crcs=hello.crcs,
    partition=hello.partition,
    world=hello.world,
    first_step=hello.step,
    first_rows=hello.rows,
    began=hello.began,
  )
  state.record('joined', hello.learner, f'incarnation {hello.incarnation}')
  state.emit(
    syncer_events.AdmitLearner(
      hello.learner,
      hello.incarnation,
      state.pace.step,
      state.closed_round,
      tuple(state.versions),
      account.rows,
      tuple(sorted(state.members.live)),
      clean=bool(account.quarantined),
      # If no process knows the CRC, the learner's own is used.
      lost_crcs=tuple(
        (p, hello.crcs[p] if crc is None else crc)
        for p, crc in sorted(recovery.lost_crcs(state).items())
      ),
    )
  )
  if state.finishing:
    state.send(
      hello.learner, messages.Finish(state.pace.step, state.last_round)
    )
  if state.ended:
    state.send(
      hello.learner, messages.Done(state.pace.step, state.closed_round)
    )


def on_inquiry(state: SyncerState, inquiry: messages.Inquiry):
  """Says if a learner is of another run; it is no session of the machine."""
  if reason := _why_another_run(state, inquiry):
    _refuse(state, inquiry, reason, final=True)
  else:
    session = inquiry.learner, inquiry.incarnation
    state.emit(syncer_events.EndSession(*session, 'answered'))


def _refuse(
  state: SyncerState, opening: messages.Opening, reason: str, **fields
):
  """Ends a stream with a refusal; `fields` are those of `Refusal`."""
  reason = messages.brief(reason)
  session = opening.learner, opening.incarnation
  state.record('refused', opening.learner, reason)
  refusal = messages.Refusal(reason, **fields)
  state.emit(syncer_events.Send(*session, refusal))
  state.emit(syncer_events.EndSession(*session, reason))


def _why_another_run(
  state: SyncerState, opening: messages.Opening
) -> str | None:
  """Returns why a learner is not of this run; None if it is."""
  ours, theirs = state.fingerprints, opening.fingerprints
  if opening.protocol != messages.PROTOCOL_VERSION:
    return (
      f'protocol {opening.protocol}, this syncer speaks '
      f'{messages.PROTOCOL_VERSION}'
    )
  if opening.run != state.run:
    return f'run {opening.run!r}, this syncer serves {state.run!r}'
  if opening.learner < 0:
    return f'learner id {opening.learner}, must be at least 0'
  differing = [
    f'another {key}: {theirs.get(key)}, the run has {ours.get(key)}'
    for key in sorted({*ours, *theirs})
    if ours.get(key) != theirs.get(key)
  ]
  return '; '.join(differing) or None


def why_refused(state: SyncerState, hello: messages.Hello) -> str | None:
  """Returns why a `Hello` is refused for good; None if it is not."""
  versions = state.versions
  if reason := _why_another_run(state, hello):
    return reason
  if not len(hello.versions) == len(hello.crcs) == len(versions):
    return (
      f'{len(hello.versions)} versions and {len(hello.crcs)} CRCs of '
      f'fragments, the run has {len(versions)}'
    )
  if not 1 <= hello.world.slices <= hello.world.of:
    return f'{hello.world.slices} slices of {hello.world.of}'
  if min(hello.step, hello.rows) < 0:
    return f'step {hello.step} and {hello.rows} rows'
  if min(hello.versions) < 0:
    return f'version {min(hello.versions)} of a fragment'
  ahead = [p for p, v in enumerate(hello.versions) if v > versions[p]]
  if ahead and not state.knows_less:
    p = ahead[0]
    return (
      f'version {hello.versions[p]} of fragment {p}, this syncer has only '
      f'{versions[p]} and has merged rounds itself: another run'
    )
  return None


def why_not_now(hello: messages.Hello, account: LearnerAccount) -> str | None:
  """Returns why an incarnation is refused, if a later one would be welcome."""
  if account.quarantined and hello.began:
    return f'quarantined until a clean bootstrap: {account.quarantined}'
  if hello.incarnation > account.incarnation:
    return None
  return (
    f'incarnation {hello.incarnation} is not newer than '
    f'{account.incarnation}, which took its place'
  )


def on_back(state: SyncerState, event: syncer_events.ShardReturned):
  """Takes back shards; one may know of later rounds than a lost ledger.

  Once this process has merged, those rounds belong to a history that the run
  has left.
  """
  newer = [x for x in event.held if x.version > state.versions[x.fragment]]
  if newer and state.knows_less:
    for learner in sorted(state.members):
      reason = 'was told of less than a shard of the syncer has'
      end_session(state, learner, reason)
    # Its leader has lost its ledger.
    known = {x.fragment: (x.version, None) for x in newer}
    recovery.adopt(state, -1, known)
  recovery.on_back(state, event)


def is_heard(state: SyncerState, learner: int, incarnation: int) -> bool:
  """Notes that a session speaks; one of an ended incarnation is dropped."""
  if state.is_current(learner, incarnation):
    mark_alive(state, learner)
    return True
  reason = f'incarnation {incarnation} has ended'
  state.record('zombie', learner, reason)
  state.emit(syncer_events.EndSession(learner, incarnation, reason))
  return False


def on_ready(
  state: SyncerState, learner: int, ready: messages.Ready
) -> str | None:
  """Makes a learner count after its bootstrap; its clock starts at t.

  Steps that it made without a session count from where its clock was, but for
  at most one round: the first round after a syncer's restart is due at once,
  and no burst of rounds follows.
  """
  if not 0 <= ready.steps_away <= state.config.spacing_steps:
    return f'steps_away={ready.steps_away}'
  if state.members[learner].ready:
    return None
  syncer_bootstrap.on_ready(state, learner)
  state.change(learner, ready=True)
  clock = state.left_clocks.pop(learner, 0) + ready.steps_away
  state.pace.join(learner, clock, state.config.quorum)
  if state.accounts[learner].quarantined:
    state.accounts[learner] = replace_unchecked(
      state.accounts[learner], strikes=0, quarantined=''
    )
  source = messages.brief(ready.source)
  reason = f'at step {state.pace.step}, inner state from {source}'
  state.record('ready', learner, reason)
  _note_slices(state, learner, source)
  return None


def _note_slices(state: SyncerState, learner: int, source: str):
  """Notes what a learner has lost that has re-formed with other slices."""
  member, account = state.members[learner], state.accounts[learner]
  world = member.world
  others = world.reformed or world.slices != account.slices
  if account.slices and others and not member.began:
    # Of another state the token ledger alone knows what is lost.
    since = account.rows
    if world.reformed:
      since = max(member.first_rows, account.counted_rows)
    lost_steps = max(0, account.rows - since) / max(account.step_rows, 1)
    state.emit(
      syncer_events.LogReformed(
        learner,
        member.incarnation,
        account.slices,
        world.slices,
        world.of,
        member.first_step,
        math.ceil(lost_steps),
        round(lost_steps * account.step_tokens),
        source,
      )
    )
    account = replace_unchecked(account, counted_rows=account.rows)
  state.accounts[learner] = replace_unchecked(account, slices=world.slices)


def on_leaving(state: SyncerState, learner: int) -> str | None:
  """Stops waiting for a leaving learner; its offers may still be merged."""
  if not state.members[learner].ready:
    return 'leaves before it was ready'
  stop_counting(state, learner)
  return None


def on_goodbye(state: SyncerState, learner: int, goodbye: messages.Goodbye):
  """Ends a session whose learner goes."""
  end_session(state, learner, messages.brief(f'goodbye: {goodbye.reason}'))


def stop_counting(state: SyncerState, learner: int):
  """Waits no longer for a learner that makes no more steps."""
  state.change(learner, leaving=True)
  state.pace.leave(learner, state.config.quorum)
  state.record('leaving', learner, 'makes no more steps')
  # It reaches no further boundary at which it could donate its state.
  syncer_bootstrap.find_others(
    state, learner, state.members[learner].incarnation
  )


def on_report(
  state: SyncerState, learner: int, report: messages.Report
) -> str | None:
  """Advances the learner's clock by one inner step."""
  member = state.members[learner]
  steps = report.step - member.step
  first = member.step == 0
  possible = (
    member.ready
    and (first or steps == 1)  # The stream loses nothing: one report a step.
    and report.step >= max(1, report.saved_step)
    and report.rows >= 0
    and report.tokens >= 0
    and math.isfinite(report.step_s)
    and 0.0 <= report.stall_s <= report.step_s
    and 0.0 <= report.made_s < math.inf
    and 0.0 <= report.link_load < math.inf
    and all(map(is_possible, report.fetched))
  )
  if not possible:
    return f'impossible report: {report}'
  sample_s = believable(report.step_s, member.step_s)
  state.change(learner, step=report.step, step_s=member.step_s.add(sample_s))
  mark_alive(state, learner)
  account = state.accounts[learner]
  state.accounts[learner] = replace_unchecked(
    account,
    rows=report.rows,
    step_rows=report.rows - account.rows,
    step_tokens=report.tokens,
  )
  # One step, whatever its number: after a reconnect the learner's own count
  # includes steps that an earlier session has reported.
  if not member.leaving:
    state.pace.advance(learner, 1, state.config.quorum)
  _on_fetched(state, learner, report.fetched)
  return None


# The part of ξ_sync (Eq. 3) that the syncer does not see is the time from a
# merge to the update's proven copy on a learner's host. The fetch times in a
# report are subtracted from the time since the update was published. Clocks are
# never compared, only durations on one clock.


def is_possible(fetched: messages.Fetched) -> bool:
  """Returns True if the reported times are finite and not negative."""
  return all(
    math.isfinite(x) and x >= 0.0 for x in (fetched.fetch_s, fetched.held_s)
  )


def _on_fetched(
  state: SyncerState, learner: int, fetched: tuple[messages.Fetched, ...]
):
  """Measures the way back for the fetches that a report names."""
  if not fetched:
    return
  for each in fetched:
    version, at_s = state.members[learner].published.get(each.fragment, (0, 0))
    if not 0 < version <= each.version:
      continue
    state.forget_published(learner, each.fragment)
    if version == each.version:
      _add_way_back(state, learner, each, state.now - at_s)
  incarnation = state.members[learner].incarnation
  handles = tuple(each.handle for each in fetched)
  state.emit(syncer_events.Retire(learner, incarnation, handles))


def _add_way_back(
  state: SyncerState, learner: int, fetched: messages.Fetched, since_s: float
):
  """Adds a sample, taking both directions of a message as equally long.

  Args:
    since_s: seconds from the update's publication to the report.
  """
  messages_s = max(0.0, since_s - fetched.fetch_s - fetched.held_s)
  way_back_s = min(since_s, messages_s / 2 + fetched.fetch_s)
  average = state.members[learner].way_back_s.add(way_back_s)
  state.change(learner, way_back_s=average)


def believable(step_s: float, average: Ema) -> float:
  """Returns a reported step time, bounded to protect the time-outs."""
  if average.value_s is None:
    return min(step_s, STEP_S_MAX)
  return min(step_s, STEP_JUMP_MAX * max(average.value_s, 1e-3))


def break_off(state: SyncerState, learner: int, reason: str):
  """Ends the session of a peer that breaks the protocol."""
  reason = messages.brief(reason)
  state.record('refused', learner, reason)
  end_session(state, learner, reason)


def end_session(state: SyncerState, learner: int, reason: str):
  """Ends a session: nothing of that incarnation is merged from now on."""
  for straggler in state.members[learner].stragglers:
    offers.drop_straggler(state, learner, straggler)
  member = state.members.pop(learner)
  state.left_clocks |= state.pace.leave(learner, state.config.quorum)
  for round_ in list(state.rounds.values()):
    if round_.stage is not Stage.MERGING:
      offers.drop_pull(state, round_, learner)
  syncer_bootstrap.on_end_of_session(state, learner, member)
  state.record('left', learner, reason)
  state.emit(syncer_events.EndSession(learner, member.incarnation, reason))
  recovery.on_end_of_session(state, (learner, member.incarnation))


def record_violation(state: SyncerState, learner: int, reason: str) -> bool:
  """Counts a refused contribution; returns True on a quarantine.

  That ends the session; only a process that starts clean may come back.
  """
  strikes = state.accounts[learner].strikes + 1
  state.accounts[learner] = replace_unchecked(
    state.accounts[learner], strikes=strikes
  )
  if strikes < outliers.STRIKES_MAX:
    return False
  reason = messages.brief(
    f'{strikes} contributions refused, the last: {reason}'
  )
  state.accounts[learner] = replace_unchecked(
    state.accounts[learner], quarantined=reason
  )
  state.record('quarantined', learner, reason)
  state.send(learner, messages.Quarantine(reason))
  end_session(state, learner, f'quarantined: {reason}')
  return True


# Silence ---------------------------------------------------------------------


def silence_max_s(state: SyncerState, learner: int) -> float | None:
  """Returns the seconds a learner may be silent; None: it has no session."""
  member = state.members.get(learner)
  if member is None:
    return None
  return timeouts.silence_max_s(member.step_s, state.config.patience)


def mark_alive(state: SyncerState, learner: int, late: bool = False):
  """Restarts a learner's silence deadline."""
  silence_s = silence_max_s(state, learner)
  state.change(
    learner, heard_s=state.now, silent_at_s=state.now + silence_s, late=late
  )


def silence_deadlines(state: SyncerState) -> list[float]:
  """Returns when each session is given up, and when to look before that.

  The looks are for the syncer itself: a missed one tells it that it was
  suspended. There are none once learners hand in, as there are no more steps to
  report.
  """
  if state.finish_at_s is not None or state.ended or not state.members:
    return []
  look_s = timeouts.look_s(state.config.patience)
  return [state.now + look_s, state.members.silent_at_s()]


def give_up_silent(state: SyncerState):
  """Ends the sessions whose deadline has passed."""
  over = state.finish_at_s is not None or state.ended
  if over or state.now < state.members.silent_at_s():
    return
  for learner, member in list(state.members.items()):
    if state.now >= member.silent_at_s:
      reason = f'silent for {silence_max_s(state, learner):.2f} s'
      end_session(state, learner, reason)


def excuse_silence(state: SyncerState, away_s: float):
  """Extends all deadlines after nothing at all happened for `away_s` seconds.

  If that is far longer than the interval between two looks, the syncer itself
  was suspended (stopped, swapped out). It must not take its own absence for the
  learners': what they sent meanwhile is still unread, and so may be the bytes
  that it was pulling.
  """
  if away_s <= 2 * timeouts.look_s(state.config.patience):
    return
  for learner, member in list(state.members.items()):
    mark_alive(state, learner, late=member.late)
    state.change(learner, published={})  # They would seem slow.
    stragglers = tuple(
      replace_unchecked(each, began_s=each.began_s + away_s)
      for each in member.stragglers
    )
    state.change(learner, stragglers=stragglers)
  for round_ in state.rounds.values():
    if round_.stage is Stage.PULLING:
      round_.due_s += away_s
      round_.quorum_at_s += away_s
      round_.pull_began_s += away_s
      round_.waits = None
