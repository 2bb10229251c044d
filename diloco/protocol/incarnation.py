# SPDX-License-Identifier: Apache-2.0
"""Incarnation numbers, which identify a process of a learner and its session.

The number rises with every process start and every session: the low 12 bits
count sessions within the process, the high bits are the process's start time.
Clocks may be set back: a process that the syncer refuses because it knows a
newer one takes the next higher number. A process that was once admitted never
does that again: a newer one has taken its place.
"""

SESSION_BITS = 12


def incarnation_of(process: int, session: int) -> int:
  """Returns the incarnation of a process's session.

  Args:
    process: start time of the process, in milliseconds since the epoch.
    session: how many sessions the process has had, this one included; from 1.
      0: none, it only inquires.
  """
  return (process << SESSION_BITS) + session


def process_after(incarnation: int) -> int:
  """Returns the first process number that is newer than that of a session."""
  return process_of(incarnation) + 1


def process_of(incarnation: int) -> int:
  """Returns the process of a session; the inverse of `incarnation_of`."""
  return incarnation >> SESSION_BITS
