# SPDX-License-Identifier: Apache-2.0
"""The machine of the syncer: what is merged, when, with which weight.

Start with `machine.Syncer.handle`, which calls the module that owns an event's
subject, then `closing`: a round from due to closed.

  machine    the dispatch, of events and of messages
  events     events and effects
  state      what all of these read and change together
  members    what is known of a learner's session, and of a learner
  sessions   hello, reports, silence, the end of a session
  offers     what learners offer: kept, superseded, used up, void
  rounds     an open round and its stages
  collecting the offers that a round can merge, quorum, grace window
  pulls      the bytes of a round's contributions
  closing    due, merge, publish; the last rounds, and the end of the run
  bootstrap  the donor of a newcomer's state
  recovery   what a restarted syncer gets back from learners
  absence    fragments whose shard is away
  way_back   how long updates take to the learners
"""

from diloco.protocol.syncer.machine import Syncer

__all__ = ['Syncer']
