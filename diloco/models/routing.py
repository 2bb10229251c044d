# SPDX-License-Identifier: Apache-2.0
"""Chooses the experts of each token, and measures their load.

Three forces act on the load. The auxiliary loss pulls the router's
probabilities away from busy experts, the z-loss keeps its logits small, and an
optional bias is added to the probabilities for the choice only (as in
DeepSeek-V3): it moves by a fixed rate against the load, and no optimizer
touches it.

Suffixes of arrays give their shape:
  B batch, L length, E experts, K top_k, N layers, 1 one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from diloco.models import api
from diloco.models.decoder_config import ExpertsConfig


class Routing(NamedTuple):
  """The routing of one layer; f32 except for the choice."""

  probs_BLE: jax.Array  # softmax of the logits.
  chosen_BLK: jax.Array  # int32, in order of preference.
  gates_BLK: jax.Array  # Weights of the chosen; they sum to 1.
  z_BL: jax.Array  # log Σ exp of the logits.
  bias_E: jax.Array | None


def route(
  logits_BLE: jax.Array, bias_E: jax.Array | None, top_k: int
) -> Routing:
  """Chooses the K experts of highest probability + bias, weighted by
  probability.

  gate_k = p_k / Σ_chosen p: the softmax over the logits of the chosen, without
  the bias.
  """
  logits_BLE = logits_BLE.astype(jnp.float32)
  probs_BLE = jax.nn.softmax(logits_BLE, axis=-1)
  scores_BLE = probs_BLE if bias_E is None else probs_BLE + bias_E[None, None]
  _, chosen_BLK = jax.lax.top_k(jax.lax.stop_gradient(scores_BLE), top_k)
  picked_BLK = jnp.take_along_axis(probs_BLE, chosen_BLK, axis=-1)
  return Routing(
    probs_BLE,
    chosen_BLK,
    picked_BLK / jnp.sum(picked_BLK, axis=-1, keepdims=True),
    jax.nn.logsumexp(logits_BLE, axis=-1),
    bias_E,
  )


def balance(routing: Routing, bias_rate: float) -> api.Metrics:
  """Returns metrics of one layer's load.

      density_e = share of the tokens that e gets; adds up to K
      aux       = mean_e(density_e · mean probability_e) · E²; even load: K
      z         = mean of (log Σ exp logits)²
      nudge     = Σ_e rate · sign(density_e − K / E) · bias_e

  `nudge` has the value 0, and the gradient of that formula, which the bias
  subtracts unscaled.

  Returns:
    'aux', 'z', 'nudge', and of the load's shares (which sum to 1) the 'entropy'
    as a share of log E and the largest, 'load_max'.
  """
  experts = routing.probs_BLE.shape[-1]
  batch, length, top_k = routing.chosen_BLK.shape
  # int32: sums in any order, on any mesh, have the same bits.
  names_E = jnp.arange(experts)[None, None, None, :]
  asked_BLKE = routing.chosen_BLK[..., None] == names_E
  count_E = jnp.sum(asked_BLKE.astype(jnp.int32), axis=(0, 1, 2))
  count_E = count_E.astype(jnp.float32)
  tokens = batch * length
  prob_E = jnp.mean(routing.probs_BLE, axis=(0, 1))
  share_E = count_E / (tokens * top_k)
  metrics = {
    'aux': jnp.mean(count_E / tokens * prob_E) * experts**2,
    'z': jnp.mean(jnp.square(routing.z_BL)),
    'nudge': jnp.zeros(()),
    'entropy': entropy(share_E) / jnp.log(float(max(experts, 2))),
    'load_max': jnp.max(share_E),
  }
  if routing.bias_E is not None:
    against_E = bias_rate * jnp.sign(count_E - tokens * top_k / experts)
    bias_E = routing.bias_E
    metrics['nudge'] = jnp.sum(
      against_E * (bias_E - jax.lax.stop_gradient(bias_E))
    )
  return metrics


def entropy(shares: jax.Array) -> jax.Array:
  """−Σ p·log p over the last axis, in nats; 0·log 0 = 0."""
  return -jnp.sum(jax.scipy.special.xlogy(shares, shares), axis=-1)


def auxiliary(
  told_N: api.Metrics, config: ExpertsConfig
) -> tuple[jax.Array, api.Metrics]:
  """Returns the terms beside the cross-entropy, and metrics of the load.

  Args:
    told_N: results of `balance`, one value per layer.

  Returns:
    Their weighted sum, and metrics: 'aux_loss' and 'z_loss' (means over the
      layers, not weighted), 'expert_entropy' (mean; 1: even load) and
      'expert_load_max' (of the worst layer; even load: 1 / E).
  """
  aux, z = jnp.mean(told_N['aux']), jnp.mean(told_N['z'])
  total = config.aux_weight * aux + config.z_weight * z
  return total + jnp.sum(told_N['nudge']), {
    'aux_loss': aux,
    'z_loss': z,
    'expert_entropy': jnp.mean(told_N['entropy']),
    'expert_load_max': jnp.max(told_N['load_max']),
  }
