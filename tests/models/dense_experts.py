# SPDX-License-Identifier: Apache-2.0
"""The reference of the mixture: every expert on every token, weighted."""

import jax
import jax.numpy as jnp


def mixture(x_BLD, chosen_BLK, gates_BLK, gate_EDF, up_EDF, down_EFD):
  """Takes what `diloco.models.moe.spread` takes, and gives the same."""
  experts = gate_EDF.shape[0]
  gate_BLEF = jnp.einsum('BLD,EDF->BLEF', x_BLD, gate_EDF)
  up_BLEF = jnp.einsum('BLD,EDF->BLEF', x_BLD, up_EDF)
  y_BLED = jnp.einsum(
    'BLEF,EFD->BLED', jax.nn.silu(gate_BLEF) * up_BLEF, down_EFD
  )
  asked_BLKE = jax.nn.one_hot(chosen_BLK, experts)
  weights_BLE = jnp.einsum('BLKE,BLK->BLE', asked_BLKE, gates_BLK)
  return jnp.einsum('BLED,BLE->BLD', y_BLED, weights_BLE)
