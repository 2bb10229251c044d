# SPDX-License-Identifier: Apache-2.0
"""The parameters of a model as an Orbax checkpoint of its own."""

import pathlib
from collections.abc import Mapping

import numpy as np

from diloco.checkpoint.orbax_files import OPERATING, orbax

# Orbax is imported when parameters are read or written, see `orbax_files`: the
# syncer does so once, at the end of the run.


def write_parameters(
  path: pathlib.Path, parameters: Mapping[str, np.ndarray]
) -> None:
  """Writes path -> f32 array atomically; replaces what was there."""
  with OPERATING:
    orbax().save(path.absolute(), dict(parameters), overwrite=True)


def read_parameters(path: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns what `write_parameters` wrote.

  Raises:
    FileNotFoundError: there is no such checkpoint, or it is not complete.
  """
  if not path.is_dir():
    raise FileNotFoundError(f'no parameters at {path}')
  with OPERATING:
    arrays = orbax().load(path.absolute())
  return {k: np.asarray(v) for k, v in arrays.items()}
