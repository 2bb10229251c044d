# SPDX-License-Identifier: Apache-2.0
"""Writes model.safetensors and its JSON, as other tools read them."""

import json
import os
import pathlib
from collections.abc import Mapping

import numpy as np
import safetensors.numpy

WEIGHTS = 'model.safetensors'
CONFIG = 'config.json'


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


def _replace(path: pathlib.Path, content: bytes) -> None:
  temporary = path.with_name(f'{path.name}.{os.getpid()}.tmp')
  temporary.write_bytes(content)
  os.replace(temporary, path)
