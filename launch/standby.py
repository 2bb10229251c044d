# SPDX-License-Identifier: Apache-2.0
"""Processes that have imported what a learner needs, and stand by for one.

`diloco.learner.standby` is what they run. The supervisor has one for each host
of a learner of several slices, an agent has one for its own.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

COMMAND = (sys.executable, '-m', 'diloco.learner.standby')
AFTER_S = 5.0  # From the start of a world to that of the next one's.


def becomes(
  standby: subprocess.Popen | None,
  command: Sequence[str],
  environment: Mapping[str, str],
) -> bool:
  """Tells a process to be another's; returns whether there is one to hear it.

  Args:
    standby: its standard input is a pipe.
    command: python -m MODULE …
    environment: added to its own.
  """
  if standby is None or standby.poll() is not None:
    return False
  _, _, module, *arguments = command
  told = {
    'module': module,
    'arguments': arguments,
    'environment': dict(environment),
  }
  with contextlib.suppress(BrokenPipeError), standby.stdin as said:
    said.write(f'{json.dumps(told)}\n'.encode())
    return True
  return False
