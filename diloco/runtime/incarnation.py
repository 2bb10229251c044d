# SPDX-License-Identifier: Apache-2.0
"""What an incarnation says: which process of a learner, which session of it.

It rises with every process start and every session; 12 bits are the session's
number within the process, the rest is when the process started.
"""

SESSION_BITS = 12


def incarnation_of(process: int, session: int) -> int:
  """Of the session number `session`, from 1, of a process.

  Args:
    process: its start, in milliseconds since the epoch.
    session: how many sessions it has had, this one included.
  """
  return (process << SESSION_BITS) + session


def process_of(incarnation: int) -> int:
  """The process that had a session; the inverse of `incarnation_of`."""
  return incarnation >> SESSION_BITS
