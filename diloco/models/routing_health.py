# SPDX-License-Identifier: Apache-2.0
"""How far the routers of several learners agree, and how evenly they route.

All learners route the tokens of the same held-out batch. Sums are f64.

Suffixes of arrays give their shape:
  M learners, N layers, B batch, L length, E experts, K top_k, P pairs.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

ROUTER = 'mlp/router'  # Suffix of the path of a router's matrix.


def router_distance(params: Sequence[Mapping[str, np.ndarray]]) -> float:
  """Mean over pairs of ‖r_a − r_b‖ / ‖mean r‖, r all routers of a learner.

  Args:
    params: path -> array, of two learners or more.
  """
  routers_M = np.stack(
    [
      np.concatenate(
        [
          np.asarray(x, np.float64).ravel()
          for path, x in sorted(each.items())
          if path.endswith(ROUTER)
        ]
      )
      for each in params
    ]
  )
  scale = np.linalg.norm(routers_M.mean(axis=0))
  distances_P = [
    np.linalg.norm(a - b) for a, b in itertools.combinations(routers_M, 2)
  ]
  return float(np.mean(distances_P) / scale)


def top_k_overlap(chosen_MNBLK: np.ndarray) -> float:
  """Mean over pairs and tokens of |A ∩ B| / K; 1: all choose alike."""
  shares_P = [
    np.mean((a[..., :, None] == b[..., None, :]).any(axis=-1))
    for a, b in itertools.combinations(chosen_MNBLK, 2)
  ]
  return float(np.mean(shares_P))


def routing_divergence(probs_MNBLE: np.ndarray) -> float:
  """Mean over tokens of H(mean p) − mean H(p), in nats: 0 … log M.

  It is the Jensen-Shannon divergence of the learners' distributions over
  experts.
  """
  probs = np.asarray(probs_MNBLE, np.float64)
  apart = _entropy(probs.mean(axis=0)) - _entropy(probs).mean(axis=0)
  return float(np.mean(apart))


def utilisation_entropy(chosen_NBLK: np.ndarray, experts: int) -> float:
  """Mean over layers of the entropy of the load, as a share of log E.

  1: every expert has equally many tokens.
  """
  if experts == 1:
    return 1.0
  loads_NE = np.stack(
    [
      np.bincount(np.ravel(layer), minlength=experts) / np.size(layer)
      for layer in np.asarray(chosen_NBLK)
    ]
  )
  return float(np.mean(_entropy(loads_NE)) / np.log(experts))


def loss_spike(losses: Sequence[float], applied: Sequence[int]) -> float:
  """Mean rise of a learner's loss from the step before a blend to that after.

  The two losses are of different batches: only the mean over many blends is
  meaningful.

  Args:
    losses: losses of its steps, in order.
    applied: for each blend, how many steps preceded it.

  Returns:
    In nats per token; NaN if there is none.
  """
  rises = [
    losses[i] - losses[i - 1]
    for i in sorted(set(applied))
    if 0 < i < len(losses)
  ]
  return float(np.mean(rises)) if rises else float('nan')


def _entropy(p: np.ndarray) -> np.ndarray:
  """−Σ p·log p over the last axis; 0·log 0 = 0."""
  return -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=-1)
