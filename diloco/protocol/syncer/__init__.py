# SPDX-License-Identifier: Apache-2.0
"""The machine of the syncer: what is merged, when, with which weight.

Start with `machine.Syncer.handle`, then `closing`: a round from due to closed.

  machine    the dispatch
  events     events and effects
  state      what sessions and rounds read and change together
  members    what is known of a learner's session, and of a learner
  sessions   hello, reports, offers, the end of a session
  silence    learners that say nothing; a syncer that was itself away
  rounds     stages of a round, and the decisions on the way
  closing    due, quorum, grace window, merge, publish
  ending     the last rounds, and the end of the run
  pulls      the bytes of a round's contributions
  bootstrap  the donor of a newcomer's state
  recovery   what a restarted syncer gets back from learners
  absence    fragments whose shard is away
  way_back   how long updates take to the learners
"""

from diloco.protocol.syncer.machine import Syncer

__all__ = ['Syncer']
