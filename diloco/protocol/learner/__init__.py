# SPDX-License-Identifier: Apache-2.0
"""The machine of a learner: when to offer, fetch, apply and leave.

Start with `machine.Learner.handle`: one event in, a list of effects out. What
the machine knows is one frozen value, `state.LearnerState`.
"""

from diloco.protocol.learner.machine import Learner

__all__ = ['Learner']
