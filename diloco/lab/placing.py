# SPDX-License-Identifier: Apache-2.0
"""Selects the devices of this machine for a run of the lab."""

import jax

from diloco.runtime.blueprint import Blueprint


def on_mesh(blueprint: Blueprint) -> tuple[Blueprint, list[jax.Device]]:
  """Returns as many devices as the mesh needs: here others may be left over."""
  mesh = blueprint.config.mesh
  return blueprint, jax.devices()[: mesh.devices]
