# SPDX-License-Identifier: Apache-2.0
"""Merges the learners' outer gradients into one (Alg. 2, line 12).

v_m is learner m's outer gradient, base_m - θ_m; w_m ≥ 0 its weight. Sums run
in ascending learner id, in f32, so that arrival order changes no bit.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from diloco.numerics import native
from diloco.numerics.codec import EncodedArray

if TYPE_CHECKING:  # The configuration reads `RULES` without jax.
  from diloco.numerics.fragments import Pieces

Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array of its shape.

# The mean of unit vectors that cancel comes out near 1e-7 in f32: below this
# length, its direction is rounding noise.
DIRECTION_MIN = 1e-6
# Shorter vectors are not normalised; 1/norm would overflow.
NORM_MIN = float(np.finfo(np.float32).tiny)


def weighted_mean(
  vs: Sequence[np.ndarray], weights: Sequence[float]
) -> np.ndarray:
  """Δ = Σ w_m·v_m / Σ w_m.

  Args:
    vs: f32 arrays of one shape, in learner order.
    weights: one per array; an array of weight zero is not read.

  Raises:
    ValueError: a weight is negative or not finite, or all are zero.
  """
  shares = _shares(weights)
  return _sum((share, v) for share, v in zip(shares, vs) if share)[0]


def rda(vs: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
  """Radial-directional averaging: the mean length along the mean direction.

      Δ = (Σ w_m·‖v_m‖ / Σ w_m) · φ(Σ w_m·φ(v_m) / Σ w_m)
      φ(x) = x / ‖x‖, φ(0) = 0

  Outer gradients of different learners are nearly orthogonal, and their plain
  mean shrinks by √M; this one does not. If there is no direction (all vectors
  are zero, or cancel: the mean of the φ(v_m) is shorter than `DIRECTION_MIN`) Δ
  is the weighted mean. The same holds for a single element, whose direction is
  a sign: learners would vote on it.

  Arguments and errors are those of `weighted_mean`.
  """
  if vs[0].size == 1:
    return weighted_mean(vs, weights)
  shares = _shares(weights)
  norms = [norm(v) if share else 0.0 for share, v in zip(shares, vs)]
  directed = [
    (share / length, v)
    for share, length, v in zip(shares, norms, vs)
    if share and length >= NORM_MIN
  ]
  if not directed:
    return weighted_mean(vs, weights)
  direction, direction_norm = _sum(directed)
  if direction_norm < DIRECTION_MIN:
    return weighted_mean(vs, weights)
  radius = math.fsum(share * length for share, length in zip(shares, norms))
  direction *= np.float32(radius / direction_norm)
  return direction


@dataclasses.dataclass(frozen=True)
class Rule:
  """A rule by which one tensor's outer gradients become one.

  Attributes:
    merge: takes the arrays and their weights, as `weighted_mean` does.
    of_whole_tensors: True if the result for a slice of rows is not that slice
      of the result for the tensor.
    takes_encoded: True if `merge` takes arrays that are still encoded.
  """

  merge: Callable[[Sequence[np.ndarray], Sequence[float]], np.ndarray]
  of_whole_tensors: bool = False
  takes_encoded: bool = False


RULES = {
  'rda': Rule(rda, of_whole_tensors=True, takes_encoded=True),
  'mean': Rule(weighted_mean, takes_encoded=True),
}


def merge(
  contributions: Mapping[int, Arrays],
  weights: Mapping[int, float],
  pieces: 'Pieces',
  rule: Rule = RULES['rda'],
  embedding_rule: Rule = RULES['mean'],
) -> dict[str, np.ndarray]:
  """Returns the merged outer gradient Δ of one fragment, piece by piece.

  Args:
    contributions: v_m by learner id, decoded or `payload.inspect`ed; the order
      of the mapping is irrelevant.
    weights: w_m of the same learners: c_tokens · (c_tokens / c_steps).
    pieces: the pieces of the fragment; norms are taken per piece, which is the
      logical tensor.
    rule: of `RULES`, or one that passes `check_rule`; pieces with role
      'averaged' take the mean.
    embedding_rule: the rule for pieces with role 'embedding'; the paper's is
      'mean', and no rule of whole tensors is right for a piece that was cut by
      rows (`config.build` refuses it).

  Raises:
    ValueError: learners without weight or the reverse, a weight negative or not
      finite, or all weights zero.
  """
  if contributions.keys() != weights.keys():
    raise ValueError(
      f'contributions of {sorted(contributions)}, weights of {sorted(weights)}'
    )
  learners = sorted(contributions)
  rules = {'embedding': embedding_rule, 'averaged': RULES['mean']}
  merged = {}
  for piece in pieces:
    chosen = rules.get(piece.role, rule)
    vs = [contributions[m][piece.name] for m in learners]
    of_piece = chosen.merge(
      vs if chosen.takes_encoded else [np.asarray(v) for v in vs],
      [weights[m] for m in learners],
    )
    merged[piece.name] = np.asarray(of_piece)  # A number is an array, too.
  return merged


def check_rule(rule: Rule) -> Rule:
  """Checks a rule of the user's own on small arrays.

  Returns:
    The rule.

  Raises:
    ValueError: equal outer gradients do not come out as they are, or the result
      is no finite f32 array of their shape, or depends on the rows of another
      slice where `of_whole_tensors` is False.
  """
  if not isinstance(rule, Rule):
    raise ValueError(
      f'gave a {type(rule).__name__}, must give a diloco.numerics.merge.Rule, '
      'such as Rule(function)'
    )
  wave = np.sin(np.arange(1, 25, dtype=np.float32)).reshape(6, 4)
  other = np.cos(wave) - wave
  for v in (wave, wave[0, 0].reshape(()), np.zeros((2, 2), np.float32)):
    for weights in ((1.0,), (1.0, 2.0, 0.5)):
      merged = _merged(rule, [v] * len(weights), weights)
      if not np.allclose(merged, v, rtol=1e-4, atol=1e-6):
        raise ValueError(
          f'the merge of {len(weights)} equal outer gradients is '
          f'{np.max(np.abs(merged - v)):.3g} off them, must be what they are'
        )
  merged = _merged(rule, [wave, other], (1.0, 2.0))
  sliced = _merged(rule, [wave[:3], other[:3]], (1.0, 2.0))
  if not (rule.of_whole_tensors or np.array_equal(sliced, merged[:3])):
    raise ValueError(
      'the merge of a slice of rows is not that slice of the merge; say '
      'Rule(…, of_whole_tensors=True)'
    )
  return rule


def _merged(rule: Rule, vs, weights) -> np.ndarray:
  given = [v.copy() for v in vs]
  merged = rule.merge(given, list(weights))
  if not isinstance(merged, np.ndarray | np.generic) or (
    merged.dtype,
    merged.shape,
  ) != (np.float32, vs[0].shape):
    described = getattr(merged, 'dtype', type(merged).__name__)
    raise ValueError(
      f'the merge of float32 {vs[0].shape} is {described} '
      f'{getattr(merged, "shape", "")}, must be numpy float32 {vs[0].shape}'
    )
  if not np.isfinite(merged).all():
    raise ValueError('the merge of finite outer gradients is not finite')
  if not all(map(np.array_equal, given, vs)):
    raise ValueError('the merge changes the arrays that it is given')
  return merged


def norm(*vs: np.ndarray | EncodedArray) -> float:
  """‖v‖ of f32 arrays, as one vector; sums are in f64, and cannot overflow."""
  return math.sqrt(math.fsum(x for v in vs for x in _squares(v)))


def _squares(v: np.ndarray | EncodedArray):
  """Returns Σ x² of each `native.SUM_VALUES` values."""
  if isinstance(v, EncodedArray):
    return v.squares
  vector, step = v.reshape(-1), native.SUM_VALUES
  return [
    np.square(vector[i : i + step], dtype=np.float64).sum()
    for i in range(0, vector.size, step)
  ]


def _shares(weights: Sequence[float]) -> list[float]:
  """w_m / Σ w, such that one learner's share is exactly 1."""
  if not all(0 <= w < math.inf for w in weights):
    raise ValueError(f'weights {list(weights)}, must be finite and ≥ 0')
  total = math.fsum(weights)
  if total == 0:
    raise ValueError(f'weights {list(weights)}: one at least must be > 0')
  return [w / total for w in weights]


def _sum(terms) -> tuple[np.ndarray, float]:
  """Σ c·v in the order given, and its norm.

  One f32 product, then one f32 addition.
  """
  factors, vs = zip(*terms)
  encoded = [v for v in vs if isinstance(v, EncodedArray)]
  if len(encoded) == len(vs):
    datas = [v.data for v in encoded]
    total, squares = native.weighted_sum_encoded(
      vs[0].codec, factors, datas, vs[0].shape
    )
    return total, math.sqrt(math.fsum(squares))
  vs = [np.asarray(v) for v in vs]
  total = None
  for c, v in zip(factors, vs):
    if total is None:
      total, product = np.empty_like(v), np.empty_like(v)
      np.multiply(v, np.float32(c), out=total)
    else:
      np.multiply(v, np.float32(c), out=product)
      np.add(total, product, out=total)
  return total, norm(total)
