# SPDX-License-Identifier: Apache-2.0
"""Effects as a person would say them: the output side of the transcripts."""

from diloco.protocol import messages
from diloco.protocol.learner import events as learner_events
from diloco.protocol.syncer import events as syncer_events


def of_syncer(effect: syncer_events.Effect) -> str:
  """One line."""
  match effect:
    case syncer_events.AdmitLearner():
      return (
        f'welcome learner {effect.learner}: step {effect.step}, '
        f'round {effect.closed_round} closed, versions {effect.versions}, '
        f'rows {effect.rows}{", clean" if effect.clean else ""}'
      )
    case syncer_events.Send():
      return f'tell learner {effect.learner}: {of_message(effect.message)}'
    case syncer_events.EndSession():
      return f'drop learner {effect.learner}: {effect.reason}'
    case syncer_events.Pull():
      return (
        f'pull round {effect.round} fragment {effect.offer.fragment} '
        f'from learner {effect.learner}'
      )
    case syncer_events.CancelPull():
      return (
        f'cancel the pull of offer {effect.handle} of learner '
        f'{effect.learner}, round {effect.round}'
      )
    case syncer_events.Merge():
      return (
        f'merge round {effect.round} into fragment {effect.fragment} '
        f'version {effect.version}: {_weights(effect.shares)} '
        f'({effect.reason}; quorum {effect.quorum_s:.2f} s, '
        f'grace {effect.grace_s:.2f} s)'
      )
    case syncer_events.KeepLedger():
      return 'keep the ledger'
    case syncer_events.Publish():
      to = ' '.join(str(m) for m, _ in effect.recipients)
      return (
        f'publish round {effect.round} fragment {effect.fragment} '
        f'version {effect.version} to {to or "nobody"}'
      )
    case syncer_events.SendFull():
      return (
        f'serve fragment {effect.fragment} to learner {effect.learner}: '
        f'{effect.reason}'
      )
    case syncer_events.TakeFragment():
      return (
        f'take fragment {effect.offered.fragment} version '
        f'{effect.offered.version} of learner {effect.learner}'
      )
    case syncer_events.AdoptVersion():
      return f'call fragment {effect.fragment} version {effect.version}'
    case syncer_events.Retire():
      return f'retire {effect.handles}, fetched by learner {effect.learner}'
    case syncer_events.LogReformed():
      return (
        f'(re-formed: learner {effect.learner}, {effect.slices_before} -> '
        f'{effect.slices} of {effect.slices_of} slices at its step '
        f'{effect.step}, {effect.lost_steps} steps and {effect.lost_tokens} '
        f'tokens lost, {effect.reason})'
      )
    case syncer_events.LogDecision():
      return f'({effect.kind}: learner {effect.learner}, {effect.reason})'
    case syncer_events.End():
      return f'end at step {effect.step}, round {effect.closed_round}'
  raise TypeError(effect)


def of_learner(effect: learner_events.Effect) -> str:
  """One line."""
  match effect:
    case learner_events.Send():
      return f'say {of_message(effect.message)}'
    case learner_events.Snapshot():
      return (
        f'offer fragment {effect.fragment} for round {effect.round}: '
        f'{effect.c_steps} steps on version {effect.base_version}'
      )
    case learner_events.HandIn():
      return f'hand in, last round {effect.last_round}'
    case learner_events.SayLeaving():
      return 'say leaving, after the offers'
    case learner_events.DonateState():
      return f'donate the state of step {effect.step} to {effect.learner}'
    case learner_events.EndDonation():
      return f'withdraw the donation to {effect.learner}'
    case learner_events.DonateFragment():
      return f'donate fragment {effect.fragment} version {effect.version}'
    case learner_events.ReadStored():
      return 'read the checkpoint of a peer'
    case learner_events.FetchState():
      return f'fetch the state of learner {effect.state.donor}'
    case learner_events.Adopt():
      return 'adopt the inner state'
    case learner_events.Draw():
      return 'draw the initial Θ'
    case learner_events.Reset():
      return 'reset the inner state'
    case learner_events.Apply():
      since = f'offer {effect.handle}' if effect.handle else 'the base'
      how = f' and carry what came since {since}' if effect.carry else ''
      tokens = []
      if effect.merged_tokens:
        tokens += [f'{effect.merged_tokens} tokens merged']
      if effect.overwritten_tokens:
        tokens += [f'{effect.overwritten_tokens} tokens overwritten']
      ledger = f' ({", ".join(tokens)})' if tokens else ''
      what = f'apply fragment {effect.fragment} version {effect.version}'
      return f'{what}{how}{ledger}'
    case learner_events.Begin():
      return f'begin at row {effect.rows}'
    case learner_events.Save():
      return 'save'
    case learner_events.Cease():
      return 'cease'
    case learner_events.FetchUpdates():
      versions = [str(update.version) for update in effect.updates]
      several = 's' if len(versions) > 1 else ''
      p, last = effect.updates[0].fragment, ' and '.join(versions[-1:])
      first = f'{versions[0]} … ' if several else ''
      return f'fetch update{several} {p} to version{several} {first}{last}'
    case learner_events.FetchFragment():
      message = effect.message
      return f'fetch all of {message.fragment} at version {message.version}'
    case learner_events.Forget():
      which = 'all' if effect.handles is None else effect.handles
      return f'forget offers: {which}'
    case learner_events.Leave():
      return f'leave{" (refused)" if effect.refused else ""}: {effect.reason}'
  raise TypeError(effect)


def of_message(message) -> str:
  """A message in a few words."""
  match message:
    case messages.Refusal():
      how = 'refused' if message.final else 'refused for now'
      newest = f', newest {message.newest}' if message.newest >= 0 else ''
      return f'{how}{newest}, {message.reason}'
    case messages.Retired():
      return f'retire offer {" ".join(str(h) for h in message.handles)}'
    case messages.OfferAgain():
      return f'offer round {message.round} again, {message.reason}'
    case messages.Finish():
      return f'finish, last round {message.last_round}'
    case messages.Done():
      return f'done, round {message.closed_round} closed'
    case messages.Hello():
      return f'hello from learner {message.learner}, {message.versions}'
    case messages.Report():
      return f'report step {message.step}' + ''.join(
        f', fragment {x.fragment} version {x.version} '
        f'fetched in {x.fetch_s:.2f} s, held {x.held_s:.2f} s'
        for x in message.fetched
      )
    case messages.WantFragment():
      return f'want fragment {message.fragment}, {message.reason}'
    case messages.WantState():
      return f'want a state, {message.reason}'
    case messages.StateOffered():
      return f'state of step {message.step} offered to {message.learner}'
    case messages.FragmentOffered():
      return f'fragment {message.fragment} version {message.version} offered'
    case messages.NoFragment():
      return f'no copy of fragment {message.fragment}, {message.reason}'
    case messages.Donate():
      of = f', partition {message.partition}' if message.partition else ''
      to = f'learner {message.learner}, from {message.versions}'
      return f'donate to {to}{of}'
    case messages.DonationOver():
      return f'donation to learner {message.learner} is over'
    case messages.StateAt():
      return f'learner {message.donor} offers its state'
    case messages.NoState():
      return f'no state, {message.reason}'
    case messages.AskFragment():
      return f'which version of fragment {message.fragment}?'
    case messages.FragmentHeld():
      what = f'version {message.version} of fragment {message.fragment}'
      return f'{what} is here'
    case messages.DonateFragment():
      return f'donate fragment {message.fragment} version {message.version}'
    case messages.Skipped():
      return f'round {message.round} is skipped'
    case messages.Postponed():
      return f'fragment {message.fragment} comes later'
    case messages.Quarantine():
      return f'quarantine, {message.reason}'
    case messages.Ready():
      away = f', {message.steps_away} steps away' if message.steps_away else ''
      return f'ready with {message.source}{away}'
    case (
      messages.Alive()
      | messages.StateTaken()
      | messages.HandedIn()
      | messages.Leaving()
      | messages.Goodbye()
    ):
      return type(message).__name__.lower()
  raise TypeError(message)


def _weights(shares: tuple[syncer_events.Share, ...]) -> str:
  return ' '.join(f'{s.learner}={s.weight:.2f}' for s in shares)
