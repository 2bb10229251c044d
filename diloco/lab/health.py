# SPDX-License-Identifier: Apache-2.0
"""Metrics of a mixture of experts at each evaluation of a lab run."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from diloco.data import pipeline
from diloco.models import interface, routing_health
from diloco.runtime.blueprint import Blueprint

Params = Mapping[str, np.ndarray]  # Path -> array.


class Health:
  """Routes one held-out batch through the models of a run.

  A model without experts has no metrics.
  """

  def __init__(self, blueprint: Blueprint):
    config = blueprint.config
    self._routing = None
    if blueprint.model.routing is None:
      return
    self._experts = config.model.experts
    text, seq_len = blueprint.text.heldout, config.data.seq_len
    rows, _ = pipeline.heldout_shape(text, seq_len, config.run.eval_batch, 1)
    (batch,) = pipeline.heldout_batches(text, seq_len, rows, 1)
    self._tokens = jnp.asarray(batch['tokens'][:, :-1])
    self._routing = jax.jit(
      lambda params, tokens: blueprint.model.routing(
        interface.unflatten(params), tokens
      )
    )

  def of(
    self,
    theta: Params,
    learners: Sequence[Params] = (),
    spikes: Sequence[float] = (),
  ) -> dict[str, float]:
    """Returns the metrics by name; empty for a model without experts.

    Args:
      theta: the global model: how even the load is once all is merged.
      learners: live ones; of two or more it says how far they agree.
      spikes: the learners' `routing_health.loss_spike`.
    """
    if self._routing is None:
      return {}
    _, chosen = self._route(theta)
    told = {
      'post_sync_expert_utilisation_entropy': (
        routing_health.utilisation_entropy(chosen, self._experts)
      )
    }
    if len(learners) >= 2:
      probs, chosen = zip(*(self._route(each) for each in learners))
      told |= {
        'inter_replica_router_distance': routing_health.router_distance(
          learners
        ),
        'top_k_routing_overlap': routing_health.top_k_overlap(np.stack(chosen)),
        'js_routing_divergence': routing_health.routing_divergence(
          np.stack(probs)
        ),
      }
    finite = [spike for spike in spikes if np.isfinite(spike)]
    if finite:
      told['post_sync_loss_spike'] = float(np.mean(finite))
    return told

  def _route(self, params: Params) -> tuple[np.ndarray, np.ndarray]:
    placed = {path: jnp.asarray(x) for path, x in params.items()}
    probs, chosen = self._routing(placed, self._tokens)
    return np.asarray(probs), np.asarray(chosen)
