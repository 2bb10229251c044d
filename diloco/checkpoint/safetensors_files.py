# SPDX-License-Identifier: Apache-2.0
"""A folder with model.safetensors and config.json, as other tools read it."""

import json
import os
import pathlib
from collections.abc import Mapping

import numpy as np
import safetensors
import safetensors.numpy

WEIGHTS = 'model.safetensors'
CONFIG = 'config.json'


def write_exported(
  folder: pathlib.Path, tensors: Mapping[str, np.ndarray], config: Mapping
) -> None:
  """Creates the folder; replaces these two files, each atomically.

  Args:
    folder: may exist, and may hold other files.
    tensors: name -> array, contiguous.
    config: plain data.
  """
  folder.mkdir(parents=True, exist_ok=True)
  # 'pt' tells readers that names and shapes are PyTorch's.
  weights = safetensors.numpy.save(dict(tensors), metadata={'format': 'pt'})
  _replace(folder / WEIGHTS, weights)
  text = json.dumps(config, indent=2, allow_nan=False) + '\n'
  _replace(folder / CONFIG, text.encode())


def read_exported(
  folder: pathlib.Path,
) -> tuple[dict[str, np.ndarray], dict]:
  """Returns the tensors and the config that `write_exported` wrote.

  Raises:
    FileNotFoundError: one of the files does not exist.
    ValueError: one of them is malformed.
  """
  config = json.loads((folder / CONFIG).read_text())
  weights = (folder / WEIGHTS).read_bytes()
  try:
    return safetensors.numpy.load(weights), config
  except safetensors.SafetensorError as error:
    raise ValueError(f'{folder / WEIGHTS}: {error}') from None


def _replace(path: pathlib.Path, content: bytes) -> None:
  temporary = path.with_name(f'{path.name}.{os.getpid()}.tmp')
  temporary.write_bytes(content)
  os.replace(temporary, path)
