# SPDX-License-Identifier: Apache-2.0
"""Reads and writes *.safetensors and their JSON, as other tools do."""

import json
import os
import pathlib
from collections.abc import Mapping

import numpy as np
import safetensors
import safetensors.numpy

WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
CONFIG = 'config.json'
FLOATS = ('F32', 'BF16', 'F16')


def write_exported(
  folder: pathlib.Path,
  tensors: Mapping[str, np.ndarray],
  files: Mapping[str, Mapping | bytes],
) -> None:
  """Creates the folder; replaces these files, each atomically.

  Args:
    folder: may exist, and may hold other files.
    tensors: name -> array, contiguous.
    files: name -> content: plain data, written as JSON, or bytes.
  """
  folder.mkdir(parents=True, exist_ok=True)
  # 'pt' tells readers that names and shapes are PyTorch's.
  weights = safetensors.numpy.save(dict(tensors), metadata={'format': 'pt'})
  _replace(folder / WEIGHTS, weights)
  for name, content in files.items():
    if not isinstance(content, bytes):
      text = json.dumps(content, indent=2, allow_nan=False) + '\n'
      content = text.encode()
    _replace(folder / name, content)


class TensorFiles:
  """The tensors of a folder, in one file or in several, of which any box can
  be read; opens all files, and reads their headers.

  Attributes:
    shapes: by name.

  Raises:
    FileNotFoundError: there are no such files; names what is missing.
    ValueError: a file is malformed or cut off, or its tensors are no floats.
  """

  def __init__(self, folder: pathlib.Path):
    self._slices = {}
    self.shapes: dict[str, tuple[int, ...]] = {}
    expected = _files(folder)
    for path, names in expected.items():
      if not path.is_file():
        raise FileNotFoundError(f'{path}: there is no such file')
      try:
        file = safetensors.safe_open(path, framework='numpy')
      except safetensors.SafetensorError as error:
        raise ValueError(f'{path}: {error}') from None
      here = set(file.keys())
      for name in sorted(here if names is None else names):
        if name not in here:
          raise ValueError(f'{path}: tensor {name!r} is missing')
        found = file.get_slice(name)
        if found.get_dtype() not in FLOATS:
          raise ValueError(
            f'{path}: tensor {name!r} is of type {found.get_dtype()}, must be '
            f'one of {", ".join(FLOATS)}'
          )
        self._slices[name] = found
        self.shapes[name] = tuple(found.get_shape())

  def read(self, name: str, box: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Returns a box of a tensor, f32; reads no more than that."""
    ranges = tuple(slice(first, last) for first, last in box)
    return np.asarray(self._slices[name][ranges]).astype(np.float32)


def _files(folder: pathlib.Path) -> dict[pathlib.Path, set[str] | None]:
  """Returns the files and the tensors in each; None: all that it has."""
  index = folder / INDEX
  if index.is_file():
    try:
      names = json.loads(index.read_text())['weight_map']
      files: dict[pathlib.Path, set[str] | None] = {}
      for name, file in names.items():
        files.setdefault(folder / file, set()).add(name)
    except (ValueError, LookupError, TypeError, AttributeError):
      raise ValueError(f'{index}: is no index of tensors') from None
    return files
  if (folder / WEIGHTS).is_file():
    return {folder / WEIGHTS: None}
  raise FileNotFoundError(f'{folder}: there is no {WEIGHTS}, and no {INDEX}')


def _replace(path: pathlib.Path, content: bytes) -> None:
  temporary = path.with_name(f'{path.name}.{os.getpid()}.tmp')
  temporary.write_bytes(content)
  os.replace(temporary, path)
