# SPDX-License-Identifier: Apache-2.0
"""The parameters of a model as an Orbax checkpoint of its own."""

import functools
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


class StoredParameters:
  """Stored parameters of `write_parameters`, of which any box can be read.

  Attributes:
    shapes: by path.

  Raises:
    FileNotFoundError: there is no such checkpoint, or it is not complete.
    ValueError: it is damaged.
  """

  def __init__(self, path: pathlib.Path):
    self._path = path.absolute()
    if not path.is_dir():
      raise FileNotFoundError(f'no parameters at {path}')
    try:
      with OPERATING:
        found = orbax().metadata(self._path).metadata
      self.shapes = {name: tuple(found[name].shape) for name in found}
    except (ValueError, AttributeError, TypeError, OSError) as error:
      first = str(error).partition('\n')[0]
      raise ValueError(f'{path}: holds no parameters: {first}') from None
    # A process reads all its boxes of a parameter one after the other.
    self._whole = functools.lru_cache(1)(self._load)

  def read(self, name: str, box: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Returns a box of a parameter, f32."""
    ranges = tuple(slice(first, last) for first, last in box)
    return self._whole(name)[ranges].astype(np.float32)

  def _load(self, name: str) -> np.ndarray:
    context = orbax().Context()
    context.pytree.loading.partial_load = True
    with OPERATING, context:
      return np.asarray(orbax().load(self._path, {name: np.ndarray})[name])
