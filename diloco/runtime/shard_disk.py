# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a shard that does not lead.

There is no ledger: the lead knows which versions the run has. What is here may
be older, and is then recovered from learners.
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

CLOSE_S = 30.0  # Limit for the last checkpoint of a stopped process.
IDENTITY = 'identity.json'


class ShardDisk:
  """One shard's checkpoints.

  Args:
    shard: takes what was found on disk.

  Raises:
    BrokenRecord: the folder belongs to another run, or to another live process.
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
    """Starts to save all pieces as they are; with `wait`, finishes it."""
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
    """Waits for the save in progress."""
    self._records.close(CLOSE_S)


def _read_identity(path: pathlib.Path) -> dict | None:
  """Returns which run the folder belongs to; None if that is unknown."""
  try:
    return json.loads(path.read_text())
  except FileNotFoundError:
    return None
  except ValueError as error:  # The lead will check these pieces.
    logging.error('%s is passed over: %s', path, error)
    return None
