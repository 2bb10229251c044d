# SPDX-License-Identifier: Apache-2.0
"""A learner gives its state to a newcomer, at one of its boundaries.

It does so once it has taken in every version that the newcomer must know, so
that the copy fits the syncer's stream of updates, as in the paper's recovery.
"""

from diloco.protocol import learner_io, messages
from diloco.protocol.learner_state import Core, Donation


def on_donate(core: Core, message: messages.Donate):
  """The syncer asks; only a learner that trains may donate."""
  if not core.state.began or core.state.ceased:
    return  # The syncer finds another when this session ends.
  donation = Donation(message.learner, message.incarnation, message.versions)
  core.set(donations=(*core.state.donations, donation))


def on_donation_over(core: Core, message: messages.DonationOver):
  """The newcomer has it, has gone, or has asked somebody else."""
  session = message.learner, message.incarnation
  core.set(
    donations=tuple(
      d for d in core.state.donations if (d.learner, d.incarnation) != session
    ),
    giving=None if core.state.giving == session else core.state.giving,
  )
  core.effects.append(learner_io.EndDonation(*session))


def donate(core: Core):
  """At a boundary: at most one copy, for the first that it can serve.

  Not while another is out, which is memory for a whole state; nor while its
  own bytes of a version are other than the syncer's.
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
