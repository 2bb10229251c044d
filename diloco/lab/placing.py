# SPDX-License-Identifier: Apache-2.0
"""Which of this machine's devices a run of the lab uses."""

import jax

from diloco.runtime.blueprint import Blueprint


def on_mesh(blueprint: Blueprint) -> tuple[Blueprint, list[jax.Device]]:
  """With as many as the mesh asks for: here others may be left over."""
  mesh = blueprint.config.mesh
  return blueprint, jax.devices()[: mesh.devices]
