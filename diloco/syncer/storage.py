# SPDX-License-Identifier: Apache-2.0
"""The ledger and checkpoints of the syncer's processes."""

import dataclasses
import json
import pathlib
import threading
import time

from absl import logging

from diloco.checkpoint.arrays import BrokenRecord
from diloco.checkpoint.syncer_records import SyncerRecords
from diloco.config import run_config
from diloco.metrics import files
from diloco.metrics.workdir import Workdir
from diloco.numerics import payload
from diloco.protocol.config import BLEND, with_current_blend
from diloco.protocol.syncer.machine import Syncer
from diloco.protocol.syncer.state import Ledger
from diloco.run.spec import RunSpec
from diloco.syncer.outer_state import OuterState
from diloco.syncer.stats import RunStats

AGAIN_S = 0.5  # Between two attempts to write the ledger.
SLOW_S = 1.0  # A ledger that takes longer to write is logged.
CLOSE_S = 30.0  # Limit for the last checkpoint of a stopped process.
IDENTITY = 'identity.json'


class LedgerWriteFailed(Exception):
  """The process has to stop, and the disk has not taken the last close."""


class StatesDisk:
  """One process's checkpoints of its fragments; only it may write there.

  Args:
    folder, states: see `SyncerRecords`.
    model: Θ; takes what a checkpoint has.
    sync: True if a written ledger has to survive a loss of power.

  Attributes:
    saved_round: the last round that is in a checkpoint of this process.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    folder: pathlib.Path,
    states: pathlib.Path,
    model: OuterState,
    sync: bool = False,
  ):
    checkpoint = run_spec.config.checkpoint
    self._folder = folder
    self._model = model
    self._identity = {**run_spec.fingerprints, 'name': run_spec.config.name}
    self._records = SyncerRecords(
      folder,
      states,
      keep_latest=checkpoint.keep_latest,
      every_rounds=checkpoint.syncer_every_rounds,
      say=logging.warning,
      batch=run_spec.config.data.batch,
      sync=sync,
    )
    self.saved_round = 0

  def occupy(self):
    """Locks the folder; call it first. See `SyncerRecords.occupy`."""
    self._records.occupy()

  def close(self, timeout_s: float = CLOSE_S) -> bool:
    """Waits for the save in progress; returns True if all were made."""
    self._records.close(timeout_s)
    return self._records.wait(0.0) and not self._records.failed

  def _same_run(self, begun: dict) -> dict:
    """Returns the fingerprints that a run begun with these has now.

    Raises:
      BrokenRecord: it is another run than this.
    """
    theirs = run_config.extended(self._identity, begun)
    if differing := run_config.differences(self._identity, theirs):
      raise BrokenRecord(f'{self._folder} is of another run: {differing}')
    return theirs

  def _restore(self) -> dict[int, int]:
    """Restores what is here from a checkpoint; returns versions by fragment."""
    owned = self._model.owned
    like = [self._model.template(p) for p in owned]
    saved = self._records.restore(like, owned)
    if saved is None:
      return {}
    for p, state in zip(owned, saved[1]):
      self._model.restore(p, state)
    return dict(zip(owned, saved[0]))

  def _save(self, closed_round: int, record=None):
    """Starts to save all fragments as they are."""
    owned = self._model.owned
    states = [self._model.state(p) for p in owned]
    if self._records.save(closed_round, states, owned, record):
      self.saved_round = closed_round


class SyncerDisk(StatesDisk):
  """One run's ledger and checkpoints.

  Args:
    model: Θ; takes what a checkpoint has.
    stats: continues the counts in the ledger.
    stop: set when the process has to leave; None: never.

  Attributes:
    crcs: CRC of every fragment at the ledger's versions, after `begin`; None:
      unknown.
    published: the event log line of the last close; None: there was none.
    final_crcs: CRCs of the result, by fragment, once the run has ended.
    total_steps: the length of the run.
  """

  def __init__(
    self,
    run_spec: RunSpec,
    workdir: Workdir,
    model: OuterState,
    stats: RunStats,
    stop: threading.Event | None = None,
  ):
    config = run_spec.config
    fsync, states = config.checkpoint.fsync, workdir.states()
    super().__init__(run_spec, workdir.syncer, states, model, fsync)
    self._run_spec = run_spec
    self._summary = workdir.summary
    self.total_steps = config.protocol.total_steps
    self._stats = stats
    self._stop = stop or threading.Event()
    # Other shards report what they hold.
    owners = enumerate(run_spec.owners.shard_of)
    self._away = tuple(p for p, shard in owners if shard)
    self.final_crcs: tuple[int, ...] | None = None
    self.crcs: tuple[int | None, ...] = ()
    self.published: dict | None = None
    self._kept: tuple | None = None  # The ledger's last contents.

  def begin(self) -> Syncer:
    """Returns the machine of a new run, or of the one in this folder.

    Raises:
      BrokenRecord: the folder can't be read, or belongs to another run.
    """
    config = self._run_spec.config
    run = config.protocol, config.name, self._run_spec.fingerprints
    record = self._records.read_ledger()
    if record is None:
      self.crcs = self._initial_crcs()
      return Syncer(*run, self._away)
    begun = with_current_blend(record[1]['fingerprints'], BLEND)
    theirs = self._same_run(begun)
    restored = self._restore()
    held = tuple(restored.get(p, 0) for p in range(config.protocol.fragments))
    # Values from a checkpoint that turned out to be broken do not count.
    ledger, counts, crcs = self._records.read_ledger() or record
    if theirs != begun:
      ledger = self._extended(ledger)
    newer = [p for p in restored if held[p] > ledger.versions[p]]
    if newer:
      p = newer[0]
      raise BrokenRecord(
        f'{self._folder}: the checkpoint has version {held[p]} of fragment '
        f'{p}, the ledger only {ledger.versions[p]}, and there is none within '
        'the checkpoint'
      )
    self._stats.resume(ledger, counts['board'])
    logging.info(
      'resumed after round %d at step %d; versions %s, here %s',
      ledger.closed_round,
      ledger.step,
      ledger.versions,
      held,
    )
    self.crcs, self.published = crcs, counts['published']
    self.final_crcs = crcs if ledger.ended else None
    return Syncer.resume(*run, ledger, held, crcs, self._away)

  def _extended(self, ledger: Ledger) -> Ledger:
    """Returns the ledger of a run that goes on, though it was to end there."""
    logging.info(
      'extended from step %d to %d steps', ledger.step, self.total_steps
    )
    self._summary.unlink(missing_ok=True)  # It says that the run is over.
    return dataclasses.replace(ledger, last_round=None, ended=False)

  def _initial_crcs(self) -> tuple[int, ...]:
    """Returns the CRCs of a new run's fragments, whichever shard has them."""
    if not self._away:
      return self._model.crcs()
    initial = self._run_spec.initial_fragments()
    layout = self._run_spec.layout
    return tuple(map(payload.crc, initial, layout.fragments))

  def keep(
    self,
    ledger: Ledger,
    crcs: tuple[int | None, ...],
    published: dict | None = None,
  ):
    """Saves a round's close; call it before any learner is told of the close.

    The ledger is written at each close; the fragments, which are large, every
    few rounds, concurrently with later ones. Only at the run's end all is
    written at once: afterwards no learner is left to recover a fragment from.

    Args:
      crcs: CRC of every fragment at the ledger's versions.
      published: the event log line of the close; None: unchanged.
    """
    self.published = published or self.published
    if ledger.ended:
      self.save_last(ledger, crcs)
      self._records.wait(CLOSE_S)
    self.commit(ledger, crcs)
    if self._records.due(ledger.closed_round):
      self.save(ledger, crcs)

  def commit(self, ledger: Ledger, crcs: tuple[int | None, ...]):
    """Writes the ledger alone; see `keep`.

    If the disk does not take it, rounds wait until it does: a round that could
    not be resumed has not closed. To learners it is as if this process were
    stopped: they train on.

    Raises:
      LedgerWriteFailed: the process has to stop before.
    """
    if ledger.ended and self.final_crcs is None:
      self.final_crcs = crcs
    kept = ledger, crcs, self.published
    if kept == self._kept:
      return  # The run ends with its last round.
    waits, began_s = False, time.monotonic()
    while True:
      try:
        self._records.write_ledger(ledger, self._counts(), crcs)
        break
      except OSError as error:
        if not waits:
          logging.error(
            'rounds wait for the disk, learners train on: %s', error
          )
        waits = True
      if self._stop.wait(AGAIN_S):
        raise LedgerWriteFailed(
          f'round {ledger.closed_round} is not in the ledger'
        )
    self._kept = kept
    took_s = time.monotonic() - began_s
    if waits or took_s > SLOW_S:
      logging.warning(
        'round %d is in the ledger: the disk took %.1f s, and held up rounds',
        ledger.closed_round,
        took_s,
      )

  def _counts(self) -> dict:
    return {
      'fingerprints': self._identity,
      'board': self._stats.counts(),
      'published': self.published,
    }

  def save(self, ledger: Ledger, crcs: tuple[int | None, ...]):
    """Starts to save all fragments as they are now, unless they are saved."""
    if ledger.closed_round == self.saved_round:
      return
    record = ledger, self._counts(), crcs
    self._save(ledger.closed_round, record)

  def save_last(self, ledger: Ledger, crcs: tuple[int | None, ...]):
    """Saves all fragments when a process leaves, after the save in progress."""
    self._records.wait(CLOSE_S)
    self.save(ledger, crcs)


class ShardDisk(StatesDisk):
  """The checkpoints of a shard that does not lead.

  There is no ledger: the leader knows which versions the run has. What is here
  may be older, and is then recovered from learners.

  Raises:
    BrokenRecord: the folder belongs to another run, or to another live process.
  """

  def __init__(
    self, run_spec: RunSpec, workdir: Workdir, shard: int, model: OuterState
  ):
    folder, states = workdir.syncer_shard(shard), workdir.states(shard)
    super().__init__(run_spec, folder, states, model)
    self.occupy()
    path = folder / IDENTITY
    identity = _read_identity(path)
    if identity is not None:
      self._same_run(identity)
    if identity != self._identity:
      files.write_json(path, self._identity)
    self._restore()

  def save(self, closed_round: int, wait: bool):
    """Starts to save all pieces as they are; with `wait`, finishes it."""
    if wait:
      self._records.wait(CLOSE_S)
    if closed_round > self.saved_round:
      self._save(closed_round)
    if wait:
      self._records.wait(CLOSE_S)


def _read_identity(path: pathlib.Path) -> dict | None:
  """Returns which run the folder belongs to; None if that is unknown."""
  try:
    return with_current_blend(json.loads(path.read_text()), BLEND)
  except FileNotFoundError:
    return None
  except ValueError as error:  # The leader will check these pieces.
    logging.error('%s is passed over: %s', path, error)
    return None
