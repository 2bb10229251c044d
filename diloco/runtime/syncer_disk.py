# SPDX-License-Identifier: Apache-2.0
"""What the syncer's process finds on its disk, and leaves there."""

import dataclasses
import threading

from absl import logging

from diloco import config as configs
from diloco.checkpoint.syncer_records import SyncerRecords
from diloco.checkpoint.volumes import BrokenRecord
from diloco.metrics.workdir import Workdir
from diloco.numerics import payload
from diloco.protocol.state import Ledger
from diloco.protocol.syncer import Syncer
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.board import Board
from diloco.runtime.global_model import GlobalModel

CLOSE_S = 30.0  # For the last checkpoint of a process that is stopped.
AGAIN_S = 0.5  # Between two attempts to write the ledger.


class NotKept(Exception):
  """The process is to stop, and the disk has not taken the last close."""


@dataclasses.dataclass(frozen=True)
class Found:
  """Where a process of the syncer begins.

  Attributes:
    machine: new, or as the ledger has it.
    ended: the run was over already.
    versions: of each fragment, as it is here; learners may have newer ones.
    crcs: of their bytes.
    published: what the tape must have of the last close; None: none has been.
    run_versions: of each fragment, as the ledger has it.
    run_crcs: of their bytes.
  """

  machine: Syncer
  ended: bool
  versions: tuple[int, ...]
  crcs: tuple[int, ...]
  published: dict | None
  run_versions: tuple[int, ...]
  run_crcs: tuple[int, ...]


class SyncerDisk:
  """One run's ledger and checkpoints of Θ; nobody else may write there.

  Args:
    blueprint: of the run.
    workdir: of the run.
    model: Θ; takes what a checkpoint has.
    board: counts on from what the ledger has.
    stop: is set when the process has to leave; None: it never has.

  Attributes:
    saved_round: the last that is in a checkpoint of this process.
    final_crcs: of the result, by fragment, once the run has ended.
  """

  def __init__(
    self,
    blueprint: Blueprint,
    workdir: Workdir,
    model: GlobalModel,
    board: Board,
    stop: threading.Event | None = None,
  ):
    self._blueprint = blueprint
    self._folder = workdir.syncer
    self._model = model
    self._board = board
    self._stop = stop or threading.Event()
    checkpoint = blueprint.config.checkpoint
    self._records = SyncerRecords(
      workdir.syncer,
      keep_latest=checkpoint.keep_latest,
      keep_best=checkpoint.keep_best,
      every_rounds=checkpoint.syncer_every_rounds,
      say=logging.warning,
      sync=checkpoint.fsync,
    )
    config = blueprint.config
    self._identity = {**blueprint.fingerprints, 'name': config.name}
    owners, own = blueprint.owners, model.owned
    self._owned = own
    # Of which other shards own pieces, too: those say what is held.
    self._away = tuple(
      p
      for p in range(config.protocol.fragments)
      if owners.of_fragment(p) != (0,)
    )
    self.saved_round = 0
    self.final_crcs: tuple[int, ...] | None = None
    self._published: dict | None = None
    self._kept: tuple | None = None  # What the ledger has.

  def occupy(self):
    """Before anything is written; see `SyncerRecords.occupy`."""
    self._records.occupy()

  def begin(self) -> Found:
    """A new run, or the one that a dead process of this folder left.

    Raises:
      BrokenRecord: what is there can't be read, or is of another run.
    """
    config = self._blueprint.config
    run = config.protocol, config.name, self._blueprint.fingerprints
    found = self._records.read_ledger()
    if found is None:
      versions = (0,) * config.protocol.fragments
      machine = Syncer(*run, self._away)
      crcs = self._initial_crcs()
      own = self._model.crcs()
      return Found(machine, False, versions, own, None, versions, crcs)
    theirs = found[1]['fingerprints']
    if differing := configs.differences(self._identity, theirs):
      raise BrokenRecord(f'{self._folder} is of another run: {differing}')
    held, states = self._read_fragments()
    # What a checkpoint says that turned out to be broken does not count.
    ledger, counts, crcs = self._records.read_ledger() or found
    self._restore_fragments(ledger, held, states)
    self._board.resume(ledger, counts['board'])
    logging.info(
      'resumed after round %d at step %d; versions %s, here %s',
      ledger.closed_round,
      ledger.step,
      ledger.versions,
      held,
    )
    machine = Syncer.resume(*run, ledger, held, crcs, self._away)
    self._published = counts['published']
    self.final_crcs = crcs if ledger.ended else None
    return Found(
      machine,
      ledger.ended,
      held,
      self._model.crcs(),
      self._published,
      ledger.versions,
      crcs,
    )

  def _initial_crcs(self) -> tuple[int, ...]:
    """Of the bytes of every fragment of a run that begins, whoever has it."""
    if not self._away:
      return self._model.crcs()
    initial = self._blueprint.initial_fragments()
    layout = self._blueprint.layout
    return tuple(map(payload.crc, initial, layout.fragments))

  def _read_fragments(self) -> tuple[tuple[int, ...], dict]:
    """Versions of all fragments, and the states of those that are here."""
    fragments = self._owned
    restored = self._records.restore([self._model.state(p) for p in fragments])
    held = [0] * self._blueprint.config.protocol.fragments
    if restored is None:
      return tuple(held), {}
    for p, version in zip(fragments, restored[0]):
      held[p] = version
    return tuple(held), dict(zip(fragments, restored[1]))

  def _restore_fragments(
    self, ledger: Ledger, versions: tuple[int, ...], states: dict
  ):
    fragments = tuple(states)
    newer = [p for p in fragments if versions[p] > ledger.versions[p]]
    if newer:
      p = newer[0]
      raise BrokenRecord(
        f'{self._folder}: the checkpoint has version {versions[p]} of '
        f'fragment {p}, the ledger only {ledger.versions[p]}, and there is '
        f'none within the checkpoint'
      )
    for p in fragments:
      self._model.restore(p, states[p])

  def keep(
    self, ledger: Ledger, crcs: tuple[int, ...], published: dict | None = None
  ):
    """A round has closed: nobody may be told before this returns.

    The ledger at each close; the fragments, which are large, every so many,
    beside the rounds. Only of the last close all of it is here in time: there
    will be nobody left to give anything back.

    Args:
      ledger: of the machine.
      crcs: of every fragment at the ledger's versions.
      published: what the tape will say of it; None: as before.
    """
    self._published = published or self._published
    if ledger.ended:
      self.save(ledger, crcs)
      self._records.wait(CLOSE_S)
    self.commit(ledger, crcs)
    if self._records.due(ledger.closed_round):
      self.save(ledger, crcs)

  def commit(self, ledger: Ledger, crcs: tuple[int, ...]):
    """Writes the ledger alone; see `keep`.

    Where the disk does not take it, rounds wait until it does: what nobody
    can go on from has not closed. To learners it is as if this process were
    stopped: they train on.

    Raises:
      NotKept: the process is to stop before.
    """
    if ledger.ended and self.final_crcs is None:
      self.final_crcs = crcs
    kept = ledger, crcs, self._published
    if kept == self._kept:
      return  # The run's end is that of its last round.
    waits = False
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
        raise NotKept(f'round {ledger.closed_round} is not in the ledger')
    self._kept = kept
    if waits:
      logging.warning('round %d is in the ledger', ledger.closed_round)

  def _counts(self) -> dict:
    return {
      'fingerprints': self._identity,
      'board': self._board.counts(),
      'published': self._published,
    }

  def save(self, ledger: Ledger, crcs: tuple[int, ...]):
    """Begins to save all fragments as they are now, unless they are saved."""
    if ledger.closed_round == self.saved_round:
      return
    states = [self._model.state(p) for p in self._owned]
    loss = self._board.mean_loss()
    record = ledger, self._counts(), crcs
    if self._records.save(
      ledger.closed_round, states, loss, self._owned, record
    ):
      self.saved_round = ledger.closed_round

  def save_last(self, ledger: Ledger, crcs: tuple[int, ...]):
    """The same for a process that leaves, after what is being written."""
    self._records.wait(CLOSE_S)
    self.save(ledger, crcs)

  def close(self):
    """Waits for the save under way."""
    self._records.close(CLOSE_S)
