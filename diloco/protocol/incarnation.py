# SPDX-License-Identifier: Apache-2.0
"""What an incarnation says: which process of a learner, which session of it.

It rises with every process start and every session; 12 bits are the session's
number within the process, the rest is when the process started. Clocks may be
set back: a process that the syncer refuses because it knows a newer one takes
the number after that. Once it has been let in it never does again: from then
on whoever is newer has taken its place.
"""

SESSION_BITS = 12


def incarnation_of(process: int, session: int) -> int:
  """Of the session number `session`, from 1, of a process.

  Args:
    process: its start, in milliseconds since the epoch.
    session: how many sessions it has had, this one included.
  """
  return (process << SESSION_BITS) + session


def process_after(incarnation: int) -> int:
  """The first process that is newer than the one that had a session."""
  return process_of(incarnation) + 1


def process_of(incarnation: int) -> int:
  """The process that had a session; the inverse of `incarnation_of`."""
  return incarnation >> SESSION_BITS
