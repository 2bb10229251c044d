# SPDX-License-Identifier: Apache-2.0
"""The configuration of a run that was made, for --config.

`flags.parse_of_run` names this file, with the run's config.json behind the
colon, where a command is given only the folder of a run.
"""

import json
import pathlib
from collections.abc import Mapping

import ml_collections

from diloco.config import run_config


def get_config(path: str) -> ml_collections.ConfigDict:
  """Returns the configuration that is in a run's config.json.

  Raises:
    ValueError: the file is missing or holds no configuration; names it.
  """
  try:
    fields = json.loads(pathlib.Path(path).read_text())
  except (OSError, ValueError) as error:
    raise ValueError(f'the configuration can not be read: {error}') from None
  if not isinstance(fields, Mapping):
    raise ValueError(f'{path}: holds no configuration')
  return ml_collections.ConfigDict(
    _with_tuples(run_config.unfold(fields)), convert_dict=True
  )


def _with_tuples(fields: Mapping) -> dict:
  """JSON has lists where the configuration has tuples."""
  return {
    key: _with_tuples(value)
    if isinstance(value, Mapping)
    else tuple(value)
    if isinstance(value, list)
    else value
    for key, value in fields.items()
  }
