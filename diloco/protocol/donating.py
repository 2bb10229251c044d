# SPDX-License-Identifier: Apache-2.0
"""Gives a learner's state to a newcomer, at one of the learner's boundaries.

A learner donates once it has taken in every version that the newcomer must
know, so that the copy fits the syncer's stream of updates, as in the
paper's recovery.
"""

from diloco.protocol import learner_io, messages
from diloco.protocol.learner_state import Core, Donation


def on_donate(core: Core, message: messages.Donate):
  """Notes the syncer's request; only a learner that trains may donate."""
  if not core.state.began or core.state.ceased:
    return  # The syncer picks another donor when this session ends.
  donation = Donation(message.learner, message.incarnation, message.versions)
  core.set(donations=(*core.state.donations, donation))


def on_donation_over(core: Core, message: messages.DonationOver):
  """Ends a donation: the newcomer has it, is gone, or has another donor."""
  session = message.learner, message.incarnation
  core.set(
    donations=tuple(
      d for d in core.state.donations if (d.learner, d.incarnation) != session
    ),
    giving=None if core.state.giving == session else core.state.giving,
  )
  core.effects.append(learner_io.EndDonation(*session))


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
        learner_io.DonateState(
          donation.learner, donation.incarnation, core.state.step
        )
      )
      return
