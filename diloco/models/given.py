# SPDX-License-Identifier: Apache-2.0
"""A model of which only parameters are known: a loop elsewhere trains it."""

from collections.abc import Mapping

import jax.numpy as jnp

from diloco.models import api


def given_model(table: Mapping[str, Mapping]) -> api.Model:
  """Makes the model of path -> 'shape' and 'role'; its loss is not here.

  Its parameters begin as they are given to the syncer; `init` has their shapes.
  """

  def init(key):
    del key
    zeros = {path: jnp.zeros(x['shape']) for path, x in table.items()}
    return api.unflatten(zeros)

  def loss(params, batch, key):
    raise TypeError('the loss of these parameters is in the loop that trains')

  return api.plain_model(
    init, loss, roles={path: x['role'] for path, x in table.items()}
  )
