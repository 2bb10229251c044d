# SPDX-License-Identifier: Apache-2.0
"""Settings of the C library's memory allocator for a process that merges."""

import ctypes

_M_ARENA_MAX = -8  # Of glibc's malloc.h.


def use_one_arena() -> bool:
  """Has all threads allocate from one heap; returns True if it took effect.

  glibc gives each thread a heap of its own, and each of those keeps as much as
  its thread ever held at once: with 10 million parameters 13 bytes for each, as
  pulls, merges and offers run on several threads. Threads that exist keep their
  heaps, so it is called before any is started. Other C libraries have no such
  heaps, or no such setting.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError):
    return False
  return mallopt(_M_ARENA_MAX, 1) == 1
