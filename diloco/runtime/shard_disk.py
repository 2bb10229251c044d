# SPDX-License-Identifier: Apache-2.0
"""What a shard that does not lead finds on its disk, and leaves there.

There is no ledger: which versions the run has, the lead knows. What is here
may be older, and is then regained from learners.
"""

import json
import pathlib

from absl import logging

from diloco import config as configs
from diloco.checkpoint.syncer_records import SyncerRecords
from diloco.checkpoint.volumes import BrokenRecord
from diloco.metrics import files
from diloco.metrics.workdir import Workdir
from diloco.runtime.blueprint import Blueprint
from diloco.runtime.shard import Shard

CLOSE_S = 30.0  # For the last checkpoint of a process that is stopped.
IDENTITY = 'identity.json'


class ShardDisk:
  """One shard's checkpoints.

  Args:
    blueprint: of the run.
    workdir: of the run.
    shard: takes what there is.

  Raises:
    BrokenRecord: what is there is of another run, or another process has it.
  """

  def __init__(self, blueprint: Blueprint, workdir: Workdir, shard: Shard):
    checkpoint = blueprint.config.checkpoint
    self._shard = shard
    self._saved_round = 0
    folder = workdir.syncer_shard(shard.shard)
    self._records = SyncerRecords(
      folder,
      keep_latest=checkpoint.keep_latest,
      keep_best=checkpoint.keep_best,
      every_rounds=checkpoint.syncer_every_rounds,
      say=logging.warning,
    )
    self._records.occupy()
    identity = {**blueprint.fingerprints, 'name': blueprint.config.name}
    path = folder / IDENTITY
    found = _read_identity(path)
    if found is None:
      files.write_json(path, identity)
    elif differing := configs.differences(identity, found):
      raise BrokenRecord(f'{folder} is of another run: {differing}')
    self._restore()

  def _restore(self):
    model = self._shard.model
    found = self._records.restore([model.state(p) for p in model.owned])
    if found is None:
      return
    for p, state in zip(model.owned, found[1]):
      model.restore(p, state)

  def save(self, closed_round: int, loss: float | None, wait: bool):
    """Begins to save all pieces as they are; `wait`: until they are there."""
    if closed_round > self._saved_round:
      model = self._shard.model
      states = [model.state(p) for p in model.owned]
      if wait:
        self._records.wait(CLOSE_S)
      if self._records.save(closed_round, states, loss, model.owned):
        self._saved_round = closed_round
    if wait:
      self._records.wait(CLOSE_S)

  def close(self):
    """Waits for the save under way."""
    self._records.close(CLOSE_S)


def _read_identity(path: pathlib.Path) -> dict | None:
  """Of which run the folder is; None where that is not known."""
  try:
    return json.loads(path.read_text())
  except FileNotFoundError:
    return None
  except ValueError as error:  # The lead will see whose these pieces are.
    logging.error('%s is passed over: %s', path, error)
    return None
