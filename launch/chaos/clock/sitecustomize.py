# SPDX-License-Identifier: Apache-2.0
"""Sets the clock wrong by which a learner's process is numbered.

Python imports this by itself where its folder is on PYTHONPATH. The file that
the environment variable names holds how wrong `time.time_ns` is, in seconds, as
one double, and may change at any time. `time.time` stays right: gRPC makes
deadlines of it that its core compares with the clock of the machine, which is
not set here.
"""

import mmap
import os
import struct
import time

VARIABLE = 'DILOCO_CHAOS_CLOCK'


def _install(path: str) -> None:
  with open(path, 'rb') as file:
    wrong = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
  right_ns = time.time_ns

  def time_ns() -> int:
    return right_ns() + int(struct.unpack('=d', wrong[:8])[0] * 1e9)

  time.time_ns = time_ns


if VARIABLE in os.environ:
  _install(os.environ[VARIABLE])
