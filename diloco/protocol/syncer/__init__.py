# SPDX-License-Identifier: Apache-2.0
"""The machine of the syncer: what is merged, when, with which weight.

Start with `machine.Syncer.handle`, which calls the module that owns an event's
subject, then `closing`: a round from due to closed.
"""

from diloco.protocol.syncer.machine import Syncer

__all__ = ['Syncer']
