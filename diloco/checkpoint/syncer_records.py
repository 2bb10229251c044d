# SPDX-License-Identifier: Apache-2.0
"""What a restarted syncer goes on from: the ledger and every fragment's state.

Written at each close, before the update leaves (persist, then send), so that
no learner ever knows of a version that a restarted syncer does not have. A
fragment's new file stands beside the old one until the ledger names it: a
process that dies in between has not closed the round.
"""

import dataclasses
import json
import os
import pathlib
import zipfile

import jax
import numpy as np

from diloco.protocol.members import Account
from diloco.protocol.state import Ledger


class BrokenRecord(Exception):
  """A file of the folder is not what a syncer wrote."""


class SyncerRecords:
  """Reads and writes one folder.

  `write_fragment` is for one thread, `write_ledger` for one, perhaps another.
  """

  def __init__(self, folder: pathlib.Path):
    self._folder = folder

  def write_fragment(self, fragment: int, state) -> None:
    """Keeps a `numerics.outer.FragmentState` beside the last one."""
    arrays = {f'theta/{k}': v for k, v in state.theta.items()}
    arrays |= {f'residual/{k}': v for k, v in state.residual.items()}
    leaves = jax.tree.leaves(state.optimizer_state)
    arrays |= {f'optimizer/{i}': np.asarray(x) for i, x in enumerate(leaves)}
    path = self._path(fragment, state.version)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix('.tmp')
    with unfinished.open('wb') as file:
      np.savez(file, **arrays)
    os.replace(unfinished, path)

  def read_fragment(self, fragment: int, version: int, like):
    """The state that was written, with the structure of `like`.

    Raises:
      BrokenRecord: it is missing or holds other arrays than `like`.
    """
    if version == 0:
      return like
    path = self._path(fragment, version)
    try:
      with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
      leaves, structure = jax.tree.flatten(like.optimizer_state)
      state = dataclasses.replace(
        like,
        theta={k: arrays[f'theta/{k}'] for k in like.theta},
        residual={k: arrays[f'residual/{k}'] for k in like.residual},
        optimizer_state=structure.unflatten(
          arrays[f'optimizer/{i}'] for i in range(len(leaves))
        ),
        version=version,
      )
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
      raise BrokenRecord(f'{path}: {error}') from error
    for name, array in like.theta.items():
      if state.theta[name].shape != array.shape:
        raise BrokenRecord(
          f'{path}: {name} is {state.theta[name].shape}, the model has '
          f'{array.shape}; another run?'
        )
    return state

  def write_ledger(self, ledger: Ledger, counts: dict) -> None:
    """Commits: what it names counts, older fragment files may go.

    `counts` is any JSON; it is handed back as it is.
    """
    unfinished = self._ledger.with_suffix('.tmp')
    fields = {**dataclasses.asdict(ledger), 'counts': counts}
    unfinished.write_text(json.dumps(fields))
    os.replace(unfinished, self._ledger)
    for fragment, version in enumerate(ledger.versions):
      self._path(fragment, version - 1).unlink(missing_ok=True)

  def read_ledger(self) -> tuple[Ledger, dict] | None:
    """Ledger and counts; None where no round has closed in this folder.

    Raises:
      BrokenRecord: the file can't be read.
    """
    try:
      fields = json.loads(self._ledger.read_text())
      ledger = Ledger(
        step=fields['step'],
        closed_round=fields['closed_round'],
        versions=tuple(fields['versions']),
        accounts=tuple((m, _account(a)) for m, a in fields['accounts']),
        ended=fields['ended'],
      )
      return ledger, fields['counts']
    except FileNotFoundError:
      return None
    except (ValueError, KeyError, TypeError) as error:
      raise BrokenRecord(f'{self._ledger}: {error!r}') from error

  @property
  def _ledger(self) -> pathlib.Path:
    return self._folder / 'ledger.json'

  def _path(self, fragment: int, version: int) -> pathlib.Path:
    return self._folder / f'fragment-{fragment:03d}-{version:06d}.npz'


def _account(fields: dict) -> Account:
  bases = {int(p): v for p, v in fields['merged_bases'].items()}
  return Account(**{**fields, 'merged_bases': bases})
