# SPDX-License-Identifier: Apache-2.0
"""How long pulls usually take, and so how long one may."""

import threading
import time
from collections.abc import Callable

import numpy as np
from absl import logging

from diloco.protocol.grace import Ema
from diloco.protocol.messages import Payload
from diloco.protocol.patience import transfer_max_s
from diloco.transport.interface import Inlet

TELL_FACTOR = 2.0  # A limit that changed by less is not worth a line.


class TransferPace:
  """The measured seconds per byte of a process's pulls.

  Args:
    patience: the run's one knob for time-outs.
    clock: seconds, monotonic.
  """

  def __init__(
    self, patience: float, clock: Callable[[], float] = time.monotonic
  ):
    self._patience = patience
    self._clock = clock
    self._lock = threading.Lock()
    self._s_per_byte = Ema()
    self._told_s = 0.0

  def limit_s(self, nbytes: int) -> float:
    """How long a pull of so many bytes may take."""
    with self._lock:
      return transfer_max_s(nbytes, self._s_per_byte, self._patience)

  def pull(self, inlet: Inlet, payload: Payload) -> np.ndarray:
    """Pulls within the limit, and learns from how long it took.

    Raises:
      TransferFailed: as `Inlet.pull`.
    """
    began_s = self._clock()
    data = inlet.pull(payload, self.limit_s(payload.nbytes))
    self._note(payload.nbytes, self._clock() - began_s)
    return data

  def _note(self, nbytes: int, took_s: float):
    with self._lock:
      self._s_per_byte = self._s_per_byte.add(took_s / max(nbytes, 1))
      limit_s = transfer_max_s(nbytes, self._s_per_byte, self._patience)
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
