# SPDX-License-Identifier: Apache-2.0
"""Each fragment's state in a file of its own, written at every close.

A fragment's new file stands beside the old one until the ledger names it: a
process that dies in between has not closed the round. Needed as long as a
restarted syncer takes nothing back from learners; then the checkpoints of
`syncer_records` are enough.
"""

import dataclasses
import os
import pathlib
import zipfile
from collections.abc import Sequence

import jax
import numpy as np

from diloco.checkpoint.volumes import BrokenRecord


class FragmentRecords:
  """Reads and writes one folder."""

  def __init__(self, folder: pathlib.Path):
    self._folder = folder

  def write(self, fragment: int, state) -> None:
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

  def read(self, fragment: int, version: int, like):
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

  def forget_older(self, versions: Sequence[int]) -> None:
    """Removes the files that a ledger with these versions does not name."""
    for fragment, version in enumerate(versions):
      self._path(fragment, version - 1).unlink(missing_ok=True)

  def _path(self, fragment: int, version: int) -> pathlib.Path:
    return self._folder / f'fragment-{fragment:03d}-{version:06d}.npz'
