# SPDX-License-Identifier: Apache-2.0
"""Finds a user model, which a configuration names as module:function.

The author of the configuration decides what is imported; no message does.
"""

import importlib
import os
import sys

from diloco.config_values import ModelConfig
from diloco.models import interface


def own_model(section: ModelConfig, batch: int, seq_len: int):
  """Returns the model that the function named by `section.kind` makes.

  Modules are found as usual in Python, and in the working directory. No device
  is touched.

  Args:
    section: section with a `kind` such as 'package.module:function'.
    batch: B of the batches that its loss will take.
    seq_len: L of those batches.

  Raises:
    ValueError: no such module or function, or its result is not a model.
  """
  module, name = section.own
  where = f'model.kind={section.kind!r}'
  # `python -m` has it on the path; a notebook may not.
  if os.getcwd() not in sys.path:
    sys.path.append(os.getcwd())
  try:
    found = importlib.import_module(module)
  except ModuleNotFoundError as error:
    raise ValueError(
      f'{where}: {error}; modules are looked for in {os.getcwd()} and where '
      'Python looks'
    ) from None
  make = getattr(found, name, None)
  if not callable(make):
    raise ValueError(f'{where}: {found.__file__} has no function {name}')
  try:
    model = make(section)
    if not isinstance(model, interface.Model):
      raise ValueError(
        f'gave a {type(model).__name__}, must give a '
        'diloco.models.interface.Model, such as plain_model(init, loss)'
      )
    interface.check_model(model)
    interface.check_loss(model, batch, seq_len)
  except ValueError as error:
    raise ValueError(f'{where}: {error}') from error
  return model
