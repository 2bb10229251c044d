# SPDX-License-Identifier: Apache-2.0
"""The protocol: two pure state machines, events in, effects out.

Start with `README.md` beside this file: it defines the words. Then read
`syncer/machine.py` and `learner/machine.py`, the two machines.

  messages         what learners and syncer say to each other
  host_messages    what the processes of one learner say to each other
  shard_messages   what the shards of a syncer say to each other
  incarnation      numbers of a learner's processes and sessions
  config           the constants of a run's protocol
  pace             how far the run is, in steps of its K-th fastest learner
  grace, weights   the grace window (Eq. 3), the weight of a contribution
  timeouts         every time-out, from what was measured and one knob
  outliers         which contributions are refused
  values           frozen dataclasses, copied with other fields

No clock, no thread, no socket, no array: time is an argument.
"""

from diloco.protocol.config import ProtocolConfig

__all__ = ['ProtocolConfig']
