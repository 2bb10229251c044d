# SPDX-License-Identifier: Apache-2.0
"""A run's final Θ, checked against the configured model."""

import numpy as np

from diloco.checkpoint.parameters import read_parameters
from diloco.metrics.workdir import Workdir
from diloco.models import api
from diloco.run.spec import RunSpec


def final_parameters(
  run_spec: RunSpec, workdir: Workdir
) -> dict[str, np.ndarray]:
  """Returns path -> f32 array, as the syncer wrote them when the run ended.

  Raises:
    FileNotFoundError: the run has not written any (yet).
    ValueError: they belong to another model.
  """
  params = read_parameters(workdir.parameters)
  wanted = {path: spec.shape for path, spec in run_spec.specs.items()}
  found = {path: x.shape for path, x in params.items()}
  for path in sorted(wanted.keys() | found.keys()):
    if wanted.get(path) != found.get(path):
      raise ValueError(
        f'{workdir.parameters}: {path!r} is {_shape(found.get(path))}, in the '
        f'model of --config {_shape(wanted.get(path))}; is it the config of '
        'this run?'
      )
  return params


def check_has_logits(model: api.Model, kind: str) -> None:
  """Checks that a model has `logits`, without which it gives no probabilities.

  Raises:
    ValueError: it has none; names the kind of model.
  """
  if model.logits is None:
    raise ValueError(
      f'model.kind={kind!r} is no language model: it has a loss, but no '
      'logits to draw text from or to score answers with'
    )


def _shape(shape: tuple[int, ...] | None) -> str:
  return 'absent' if shape is None else f'of shape {list(shape)}'
