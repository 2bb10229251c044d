# SPDX-License-Identifier: Apache-2.0
"""The machine of a learner: when to offer, fetch, apply and leave.

Start with `machine.Learner.handle`: one event in, a list of effects out.

  machine    the dispatch, and what happens at an inner-step boundary
  events     events and effects
  state      what the machine knows, as one frozen value
  bootstrap  the way into a run; giving and taking another learner's state
  offers     which round is offered next
  snapshots  copies that become offers: due, refreshed, asked for again, last
  updates    announced, fetched, rebuilt, applied
  leaving    in good order, within the notice that was given
"""

from diloco.protocol.learner.machine import Learner

__all__ = ['Learner']
