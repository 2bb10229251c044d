# SPDX-License-Identifier: Apache-2.0
"""Measures how long pulls usually take, and sets their time limits."""

import threading
import time
from collections.abc import Callable

import numpy as np
from absl import logging

from diloco.protocol import patience
from diloco.protocol.messages import Payload
from diloco.protocol.transfer_time import TransferTime
from diloco.transport.interface import Inlet, TimedOut

TELL_FACTOR = 2.0  # A smaller change is not worth a log line.


class TransferPace:
  """Measured durations of pulls from one peer, or from equivalent ones.

  Args:
    knob: `ProtocolConfig.patience`, the run's factor on time-outs.
    clock: seconds, monotonic.
  """

  def __init__(self, knob: float, clock: Callable[[], float] = time.monotonic):
    self._patience = knob
    self._clock = clock
    self._lock = threading.Lock()
    self._time = TransferTime()
    self._told_s = 0.0

  def limit_s(self, nbytes: int) -> float:
    """Returns how many seconds a pull of `nbytes` may take."""
    with self._lock:
      return patience.transfer_max_s(self._time, nbytes, self._patience)

  def pull(self, inlet: Inlet, payload: Payload) -> np.ndarray:
    """Pulls within the limit, and adds the duration to the measurements.

    Raises:
      TransferFailed: as `Inlet.pull`.
    """
    began_s, limit_s = self._clock(), self.limit_s(payload.nbytes)
    try:
      data = inlet.pull(payload, limit_s)
    except TimedOut:
      with self._lock:  # The next limit is longer.
        self._time = patience.after_transfer_failed(
          self._time, payload.nbytes, limit_s, self._patience
        )
      raise
    self._note(payload.nbytes, self._clock() - began_s)
    return data

  def _note(self, nbytes: int, took_s: float):
    with self._lock:
      self._time = self._time.add(nbytes, took_s)
      limit_s = patience.transfer_max_s(self._time, nbytes, self._patience)
      told_s, changed = self._told_s, max(limit_s, 1e-9)
      if 1 / TELL_FACTOR < told_s / changed < TELL_FACTOR:
        return
      self._told_s = limit_s
    logging.info(
      'time-out of a pull: %.1f s (%d bytes took %.3f s)',
      limit_s,
      nbytes,
      took_s,
    )
