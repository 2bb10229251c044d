# SPDX-License-Identifier: Apache-2.0
"""The parameters that `model.init_from` names, box by box.

No process has all of them in memory because of this: a learner reads the shards
of its devices, the syncer its fragments. Importing this imports no jax, nor
does checking a folder of Hugging Face: launchers do so, too.
"""

import hashlib
from collections.abc import Callable, Mapping

import numpy as np

from diloco.config import pretrained
from diloco.config.sections import ModelConfig
from diloco.models.hf_format import Tensors
from diloco.models.kinds import sizes_of

Box = tuple[tuple[int, int], ...]
Shapes = Mapping[str, tuple[int, ...]]

SAMPLED_ROWS, SAMPLED_VALUES = 64, 64  # Of each parameter, by axis.


class InitialWeights:
  """Parameters of one model in files.

  Args:
    read: path and box -> f32 values.
  """

  def __init__(self, read: Callable[[str, Box], np.ndarray]):
    self.read = read

  def whole(self, shapes: Shapes) -> dict[str, np.ndarray]:
    """Returns path -> f32 array."""
    return {
      path: self.read(path, tuple((0, n) for n in shape))
      for path, shape in sorted(shapes.items())
    }

  def fingerprint(self, shapes: Shapes) -> str:
    """Returns 16 hex digits of names, shapes and a sample of the values.

    The sample has up to 64 rows of each parameter, whatever files it is in.
    Weights that differ elsewhere alone are told apart by the CRCs of whole
    fragments, which a learner and its syncer compare as always.
    """
    digest = hashlib.sha256()
    for path, shape in sorted(shapes.items()):
      digest.update(f'{path} {list(shape)}\n'.encode())
      rest = tuple((0, min(n, SAMPLED_VALUES)) for n in shape[1:])
      rows = shape[0] if shape else 1
      for row in range(0, rows, max(1, rows // SAMPLED_ROWS)):
        box = ((row, row + 1), *rest) if shape else ()
        digest.update(np.ascontiguousarray(self.read(path, box)).tobytes())
    return digest.hexdigest()[:16]


def open_weights(
  model: ModelConfig, shapes: Shapes | None = None
) -> InitialWeights | None:
  """Opens the files and checks what is in them; None: the model is drawn.

  Args:
    shapes: path -> shape of each parameter; None: only what is known without
      jax is checked, and nothing returned.

  Raises:
    FileNotFoundError: something is not there; names it.
    ValueError: the weights are of another model, malformed or cut off, or a
      package is missing.
  """
  source = pretrained.of_model(model)
  if source is None:
    return None
  pretrained.check_section(model)
  try:
    if source.is_hf:
      return _of_hf(source, model)
    if shapes is None:
      return None
    # Not at the top: it imports jax and Orbax.
    from diloco.checkpoint.parameters import StoredParameters

    stored = StoredParameters(source.folder)
    _compare(stored.shapes, shapes)
    return InitialWeights(stored.read)
  except (FileNotFoundError, ValueError) as error:
    raise type(error)(f'model.init_from={source.value!r}: {error}') from None


def _of_hf(source: pretrained.Pretrained, model: ModelConfig) -> InitialWeights:
  try:
    from diloco.checkpoint.safetensors_files import TensorFiles
  except ImportError:
    raise ValueError(
      "needs the package safetensors: pip install 'diloco[export]'"
    ) from None
  files = TensorFiles(source.folder)
  tensors = Tensors(sizes_of(model))
  tensors.check(files.shapes)
  return InitialWeights(lambda path, box: tensors.read(path, box, files.read))


def _compare(found: Shapes, wanted: Shapes) -> None:
  """Refuses parameters of another model."""
  for path in sorted(wanted.keys() | found.keys()):
    if path not in found:
      raise ValueError(f'parameter {path!r} is missing')
    if path not in wanted:
      raise ValueError(f'parameter {path!r} is none of the model')
    if found[path] != wanted[path]:
      raise ValueError(
        f'parameter {path!r} is of shape {list(found[path])}, must be of '
        f'{list(wanted[path])}'
      )
