# SPDX-License-Identifier: Apache-2.0
"""Heaps of a process whose threads allocate, counted by glibc itself."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
  platform.libc_ver()[0] != 'glibc', reason='heaps of glibc'
)

# malloc_info writes XML with an element for each heap.
HEAPS = """
import ctypes, os, sys, threading
from diloco.run.allocator import keep_memory

if sys.argv[1] == 'one':
  assert keep_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
held = threading.Barrier(4)


def allocate():
  assert libc.malloc(1 << 16)
  held.wait()


threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
  thread.start()
for thread in threads:
  thread.join()
file = ctypes.c_void_p(libc.fdopen(os.dup(1), b'w'))
assert libc.malloc_info(0, file) == 0
libc.fclose(file)
"""


@pytest.mark.parametrize(('given', 'one'), [('one', True), ('many', False)])
def test_threads_share_one_heap(given, one):
  done = subprocess.run(
    [sys.executable, '-c', HEAPS, given],
    capture_output=True,
    text=True,
    check=True,
  )
  assert (done.stdout.count('<heap nr=') == 1) == one
