# SPDX-License-Identifier: Apache-2.0
"""Makes the kernel kill a child whose launcher died, however it died.

The child arranges that itself, in this file run as a script, and then becomes
its actual program. A `preexec_fn` would run between fork and exec of the
launcher; if the launcher has threads (gRPC, JAX), such a fork can hang.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def dying_with_parent(arguments: Sequence[str]) -> list[str]:
  """Returns the command line of `arguments`, dying with the calling thread.

  The kernel sends SIGKILL when the *thread* that started the child ends, so
  children are started from the main thread. Where the kernel has no such
  signal, `arguments` come back as they are.
  """
  if sys.platform != 'linux':
    return list(arguments)
  # Isolated and without site: 10 ms, and nothing of the environment is read.
  script = [sys.executable, '-I', '-S', os.path.abspath(__file__)]
  return [*script, str(os.getpid()), *arguments]


def main(parent: int, arguments: Sequence[str]):
  """Asks for the signal, then is `arguments`."""
  libc = ctypes.CDLL(None, use_errno=True)
  if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
    raise OSError(ctypes.get_errno(), 'prctl(PR_SET_PDEATHSIG)')
  if os.getppid() != parent:  # It died before prctl: no signal will come.
    sys.exit(1)
  try:
    os.execvp(arguments[0], arguments)
  except OSError as error:
    print(f'{arguments[0]}: {error.strerror}', file=sys.stderr)
    sys.exit(os.EX_CONFIG)


if __name__ == '__main__':
  if len(sys.argv) < 3 or not sys.argv[1].isdecimal():
    print(f'{__doc__}\n  parent_death.py PID COMMAND …', file=sys.stderr)
    sys.exit(os.EX_USAGE)
  main(int(sys.argv[1]), sys.argv[2:])
