# SPDX-License-Identifier: Apache-2.0
"""Lets the kernel kill a child whose launcher died, however it died."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Loaded before any fork: between fork and exec nothing may be imported.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == 'linux' else None


def die_with_parent() -> Callable[[], None] | None:
  """A `preexec_fn` after which the child dies with this thread.

  The kernel sends SIGKILL when the *thread* that forked ends, so children are
  started from the main thread. None where the kernel has no such signal.
  """
  if _LIBC is None:
    return None
  parent = os.getpid()

  def in_child():
    if _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
      raise OSError(ctypes.get_errno(), 'prctl(PR_SET_PDEATHSIG)')
    if os.getppid() != parent:  # It died before prctl: no signal will come.
      os._exit(1)

  return in_child
