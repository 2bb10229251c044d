# SPDX-License-Identifier: Apache-2.0
"""A run's final Θ, checked to be the parameters of the configured model."""

import numpy as np

from diloco.checkpoint.parameters import read_parameters
from diloco.metrics.workdir import Workdir
from diloco.models import interface
from diloco.runtime.blueprint import Blueprint


def final_parameters(
  blueprint: Blueprint, workdir: Workdir
) -> dict[str, np.ndarray]:
  """Path -> f32 array, as the syncer left them when the run ended.

  Raises:
    FileNotFoundError: the run has left none (yet).
    ValueError: they are those of another model.
  """
  params = read_parameters(workdir.parameters)
  wanted = {path: spec.shape for path, spec in blueprint.specs.items()}
  found = {path: x.shape for path, x in params.items()}
  for path in sorted(wanted.keys() | found.keys()):
    if wanted.get(path) != found.get(path):
      raise ValueError(
        f'{workdir.parameters}: {path!r} is {_shape(found.get(path))}, in the '
        f'model of --config {_shape(wanted.get(path))}; is it the config of '
        'this run?'
      )
  return params


def check_has_logits(model: interface.Model, kind: str) -> None:
  """A model without `logits` gives no chances of tokens.

  Raises:
    ValueError: names the kind.
  """
  if model.logits is None:
    raise ValueError(
      f'model.kind={kind!r} is no language model: it has a loss, but no '
      'logits to draw text from or to score answers with'
    )


def _shape(shape: tuple[int, ...] | None) -> str:
  return 'absent' if shape is None else f'of shape {list(shape)}'
