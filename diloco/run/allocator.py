# SPDX-License-Identifier: Apache-2.0
"""Settings of the C library's memory allocator for a process of a run."""

import ctypes

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8


def keep_memory() -> bool:
  """Has all threads allocate from one heap, which keeps what they free.

  glibc gives large blocks back to the kernel at once, and the next step or
  merge faults their pages in again: on 2 cores the quickstart's first 150 steps
  took 22 s, and 17 s with memory that is kept. It also gives each thread a heap
  of its own, each of which keeps as much as its thread ever held at once: 13
  bytes a parameter at a syncer. Threads that exist keep their heaps, so it is
  called before any is started.

  Returns:
    True if there is one heap. Other C libraries have no such settings, and may
    refuse thresholds that are so high.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError):
    return False
  mallopt(_M_MMAP_THRESHOLD, 1 << 30)
  mallopt(_M_TRIM_THRESHOLD, 1 << 30)
  mallopt(_M_TOP_PAD, 1 << 26)
  return mallopt(_M_ARENA_MAX, 1) == 1
