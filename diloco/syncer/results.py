# SPDX-License-Identifier: Apache-2.0
"""Writes a run's results: its final Θ, gathered from all shards, a summary.

They are written while the learners are still connected: learners hold Θ too,
and are only released when it is on disk.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from absl import logging

from diloco.checkpoint.parameters import write_parameters
from diloco.config import run_config
from diloco.metrics import figures, names
from diloco.metrics.status import (
  RunStatus,
  newest_heldout,
  write_status,
  write_summary,
)
from diloco.metrics.workdir import SYNCER, Workdir
from diloco.metrics.writer import Writer, open_views
from diloco.numerics import fragments, payload
from diloco.protocol import messages
from diloco.protocol.syncer.machine import Syncer
from diloco.run.spec import RunSpec
from diloco.syncer.shard_coordinator import ShardCoordinator
from diloco.syncer.stats import RunStats
from diloco.transport.data_plane import DataPlane, TransferFailed

AGAIN_S = 0.5  # Between two attempts to write to a full disk.
GATHER_S = 120.0  # Limit for the bytes of a fragment.

Offered = tuple[str, messages.Payload]  # Address, and what is there.


class ResultLost(Exception):
  """No process has the final Θ that the ledger names any more."""


class Results:
  """Writes `status.json` while the run lasts, and its results at the end.

  Args:
    tell: takes each status, too.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    workdir: Workdir,
    stats: RunStats,
    stop: threading.Event,
    tell: Callable[[RunStatus], None] | None = None,
  ):
    self._tell = tell
    self._layout = run_spec.layout
    self._workdir = workdir
    self._stats = stats
    self._stop = stop
    self._silent = False  # Whether the last status could not be written.
    self._board: Writer | None = None  # None: the disk is full.
    self._every_steps = run_spec.config.run.log_every_steps
    self._hparams = run_config.flat(run_spec.config)
    self._shown_step = 0
    self._open_board()

  def tell_status(self):
    """Replaces `status.json`; logs once if the disk is full."""
    status = self._status(False)
    self._show(status)
    try:
      write_status(self._workdir.status, status)
      self._silent = False
    except OSError as error:
      if not self._silent:
        logging.warning('the status is not written: %s', error)
      self._silent = True

  def _status(self, finished: bool) -> RunStatus:
    """Adds what the evaluator has measured to what the syncer counts."""
    return dataclasses.replace(
      self._stats.status(finished), **newest_heldout(self._workdir)
    )

  def _open_board(self):
    if self._board is None:
      with contextlib.suppress(OSError):  # Its queue may be in a file.
        self._board = open_views(self._workdir, SYNCER, self._hparams)

  def _show(self, status: RunStatus):
    """Tells it, and adds points to the curves, which another thread writes."""
    if self._tell is not None:
      self._tell(status)
    if (
      status.step < self._shown_step + self._every_steps and not status.finished
    ):
      return
    self._open_board()
    if self._board is not None:
      self._shown_step = status.step
      scalars = {names.TIME: status.time_s, **figures.curves(status)}
      self._board.write_scalars(status.step, scalars)

  def close(self):
    """Writes what TensorBoard has not got yet."""
    if self._board is not None:
      self._board.close()

  def write(
    self, parameters: Mapping[str, np.ndarray], crcs: Sequence[int]
  ) -> bool:
    """Writes all results; waits for a disk that is full.

    Args:
      parameters: path -> f32 array.
      crcs: CRC of every fragment's bytes, from the ledger.

    Returns:
      False if the process has to leave before that.

    Raises:
      ResultLost: the parameters differ from the ledger's; nothing is written.
    """
    final = tuple(
      payload.crc(fragments.take(parameters, pieces), pieces)
      for pieces in self._layout.fragments
    )
    if final != tuple(crcs):
      raise ResultLost(_say_lost(final, crcs))
    workdir, status = self._workdir, self._status(True)
    self._show(status)
    # The summary is written last: once it exists, the run is over.
    return (
      self._insist(lambda: write_parameters(workdir.parameters, parameters))
      and self._insist(lambda: write_status(workdir.status, status))
      and self._insist(lambda: write_summary(workdir.summary, status))
    )

  def _insist(self, write: Callable[[], None]) -> bool:
    """Retries until it is written; returns False if the process must leave."""
    waits = False
    while True:
      try:
        write()
        return True
      except (OSError, ValueError) as error:  # TensorStore raises ValueError.
        if not waits:
          logging.error('the result waits for the disk: %s', error)
        waits = True
      if self._stop.wait(AGAIN_S):
        return False


def _say_lost(final_crcs: Sequence[int], crcs: Sequence[int]) -> str:
  wrong = [
    f'fragment {p} has the CRC {here:08x}, the ledger {crc:08x}'
    for p, (here, crc) in enumerate(zip(final_crcs, crcs, strict=True))
    if here != crc
  ]
  return f'the final parameters are not those of the run: {"; ".join(wrong)}'


class ResultCollector:
  """Collects other shards' fragments one by one, again if a shard dies."""

  def __init__(
    self, run_spec: RunSpec, plane: DataPlane, shards: ShardCoordinator
  ):
    self._run_spec = run_spec
    self._plane = plane
    self._shards = shards
    self._left = set(shards.elsewhere)
    self._asked = False

  def done(self, machine: Syncer, parameters: dict[str, np.ndarray]) -> bool:
    """Collects as much as is possible now; call it again after each event.

    Args:
      parameters: path -> f32 array; receives the pieces.
    """
    if self._shards.unsaved:
      return False  # A shard that dies from here on has lost nothing.
    ready = self._left.difference(machine.away, machine.lost)
    if ready and not self._asked:
      self._asked, p = True, min(ready)
      self._shards.collect(p, lambda offer: self._take(p, offer, parameters))
    return not self._left

  def _take(self, p: int, offer: Offered | None, parameters):
    """Pulls a fragment from where it is on offer, if it is."""
    self._asked = False
    if offer is None:
      return
    address, offered = offer
    try:
      with contextlib.closing(self._plane.fetcher(address)) as fetcher:
        data = fetcher.pull(offered, GATHER_S)
    except (TransferFailed, ValueError) as error:
      logging.warning('fragment %d at %s: %s', p, address, error)
      return
    pieces = self._run_spec.layout.fragments[p]
    arrays = payload.decode(data, pieces, self._run_spec.full)
    parameters.update(fragments.put(parameters, pieces, arrays))
    self._left.discard(p)
