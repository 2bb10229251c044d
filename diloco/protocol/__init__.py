# SPDX-License-Identifier: Apache-2.0
"""The protocol: two pure state machines, events in, effects out.

Start with `README.md` beside this file: it defines the words, and says which
module holds what. Then read `syncer/machine.py` and `learner/machine.py`, the
two machines. No clock, no thread, no socket, no array: time is an argument.
"""

from diloco.protocol.config import ProtocolConfig

__all__ = ['ProtocolConfig']
