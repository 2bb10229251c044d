# SPDX-License-Identifier: Apache-2.0
"""Waits, with a deadline, for states that nothing tells of."""

import threading
import time
from collections.abc import Callable

import pytest

LOOK_EVERY_S = 0.02


def until(
  holds: Callable[[], bool],
  deadline_s: float,
  what: str | Callable[[], str],
  look_every_s: float = LOOK_EVERY_S,
):
  """Waits until `holds()`, and fails the test where it never does.

  Args:
    holds: looked at now and then; may do a turn of what is waited for.
    deadline_s: minutes, for what takes seconds on a quiet machine.
    what: is waited for; a function is asked when the deadline has passed.
    look_every_s: between two looks.
  """
  give_up_s = time.monotonic() + deadline_s
  pause = threading.Event()
  late = False
  while not holds():
    if late:
      told = what() if callable(what) else what
      pytest.fail(f'not within {deadline_s} s: {told}')
    # One look more after that: all may have stood still since the last.
    late = time.monotonic() >= give_up_s
    pause.wait(look_every_s)
