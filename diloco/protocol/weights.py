# SPDX-License-Identifier: Apache-2.0
"""The weight of a contribution: quantity times quality of its tokens."""

from collections.abc import Mapping


def token_weight(c_tokens: int, c_steps: int) -> float:
  """w = c_tokens · (c_tokens / c_steps) (Alg. 2, line 9); 0 without a step."""
  return c_tokens * (c_tokens / c_steps) if c_steps else 0.0


def equal_weight(c_tokens: int, c_steps: int) -> float:
  """w = 1; 0 for a contribution without a step."""
  return 1.0 if c_steps else 0.0


WEIGHTS = {'tokens': token_weight, 'equal': equal_weight}


def normalised(weights: Mapping[int, float]) -> dict[int, float]:
  """Returns weights that sum to 1, in ascending id; equal if all are 0."""
  total = sum(weights[m] for m in sorted(weights))
  if total == 0.0:
    return {m: 1.0 / len(weights) for m in sorted(weights)}
  return {m: weights[m] / total for m in sorted(weights)}
