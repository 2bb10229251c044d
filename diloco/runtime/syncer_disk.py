# SPDX-License-Identifier: Apache-2.0
"""What the syncer's process finds on its disk, and leaves there."""

import dataclasses

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
  """One run's ledger and checkpoints of Θ.

  Args:
    blueprint: of the run.
    workdir: of the run.
    model: Θ; takes what a checkpoint has.
    board: counts on from what the ledger has.
  """

  def __init__(
    self,
    blueprint: Blueprint,
    workdir: Workdir,
    model: GlobalModel,
    board: Board,
  ):
    self._blueprint = blueprint
    self._folder = workdir.syncer
    self._model = model
    self._board = board
    checkpoint = blueprint.config.checkpoint
    self._records = SyncerRecords(
      workdir.syncer,
      keep_latest=checkpoint.keep_latest,
      keep_best=checkpoint.keep_best,
      every_rounds=checkpoint.syncer_every_rounds,
      say=logging.warning,
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
    self._published: dict | None = None

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
    ledger, counts, crcs = found
    differing = configs.differences(self._identity, counts['fingerprints'])
    if differing:
      raise BrokenRecord(f'{self._folder} is of another run: {differing}')
    held = self._restore_fragments(ledger)
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

  def _restore_fragments(self, ledger: Ledger) -> tuple[int, ...]:
    fragments = self._owned
    restored = self._records.restore([self._model.state(p) for p in fragments])
    held = [0] * len(ledger.versions)
    if restored is None:
      return tuple(held)
    for p, version in zip(fragments, restored[0]):
      held[p] = version
    versions, states = tuple(held), dict(zip(fragments, restored[1]))
    newer = [p for p in fragments if versions[p] > ledger.versions[p]]
    if newer:
      p = newer[0]
      raise BrokenRecord(
        f'{self._folder}: the checkpoint has version {versions[p]} of '
        f'fragment {p}, the ledger only {ledger.versions[p]}: the ledger is '
        f'an old copy'
      )
    for p in fragments:
      self._model.restore(p, states[p])
    return versions

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
      self.save(ledger)
      self._records.wait(CLOSE_S)
    self.commit(ledger, crcs)
    if self._records.due(ledger.closed_round):
      self.save(ledger)

  def commit(self, ledger: Ledger, crcs: tuple[int, ...]):
    """Writes the ledger alone; see `keep`."""
    counts = {
      'fingerprints': self._identity,
      'board': self._board.counts(),
      'published': self._published,
    }
    self._records.write_ledger(ledger, counts, crcs)

  def save(self, ledger: Ledger):
    """Begins to save all fragments as they are now, unless they are saved."""
    if ledger.closed_round == self.saved_round:
      return
    states = [self._model.state(p) for p in self._owned]
    loss = self._board.mean_loss()
    if self._records.save(ledger.closed_round, states, loss, self._owned):
      self.saved_round = ledger.closed_round

  def save_last(self, ledger: Ledger):
    """The same for a process that leaves, after what is being written."""
    self._records.wait(CLOSE_S)
    self.save(ledger)

  def close(self):
    """Waits for the save under way."""
    self._records.close(CLOSE_S)
