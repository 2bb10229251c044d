# SPDX-License-Identifier: Apache-2.0
"""The merge and the codecs for pytrees, leaf by leaf; an array is one leaf.

The syncer merges pieces of fragments, see `merge` and `codec`; the arithmetic
here is theirs, to the bit.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from diloco.numerics import codec as codecs
from diloco.numerics import merge as merges

Tree = Any  # A pytree of arrays: nested dicts, lists, a model's parameters, …


def merge(
  contributions: Mapping[int, Tree] | Sequence[Tree],
  weights: Mapping[int, float] | Sequence[float] | None = None,
  rule: str = 'rda',
) -> Tree:
  """Merges the outer gradients of learners into one (the paper's Alg. 2).

  Sums run in f32 in ascending learner id, whatever the order of a mapping. The
  paper merges embedding and output head by 'mean': merge these apart.

  Args:
    contributions: v_m = Θ − θ_m by learner id, or in its order: pytrees of one
      structure, whose arrays have the same shapes.
    weights: w_m ≥ 0 of the same learners; None: all are equal.
    rule: 'rda', or 'mean', of each leaf by itself.

  Returns:
    The pytree of merged f32 arrays, on the host.

  Raises:
    ValueError: there is no such rule; trees or shapes differ; weights are of
      others, negative, not finite, or all zero.
  """
  if rule not in merges.RULES:
    raise ValueError(f'rule={rule!r}: must be one of {", ".join(merges.RULES)}')
  by_id = _by_id(contributions)
  if not by_id:
    raise ValueError('contributions: are none, there is nothing to merge')
  of_id = dict.fromkeys(by_id, 1.0) if weights is None else _by_id(weights)
  if by_id.keys() != of_id.keys():
    raise ValueError(
      f'contributions of {sorted(by_id)}, weights of {sorted(of_id)}'
    )
  ids = sorted(by_id)
  leaves, structure = zip(*(jax.tree.flatten(by_id[m]) for m in ids))
  if differing := [m for m, x in zip(ids, structure) if x != structure[0]]:
    raise ValueError(
      f'contributions of {ids[0]} and {differing[0]}: {structure[0]} and '
      f'{structure[ids.index(differing[0])]}, must be one structure'
    )
  merged = []
  for vs in zip(*leaves):
    arrays = [np.asarray(v, np.float32) for v in vs]
    if len(shapes := {v.shape for v in arrays}) > 1:
      raise ValueError(f'contributions: leaves of shapes {sorted(shapes)}')
    merged.append(merges.RULES[rule].merge(arrays, [of_id[m] for m in ids]))
  return jax.tree.unflatten(structure[0], merged)


def rda(
  contributions: Mapping[int, Tree] | Sequence[Tree],
  weights: Mapping[int, float] | Sequence[float] | None = None,
) -> Tree:
  """Radial-directional averaging: the mean length along the mean direction.

      Δ = (Σ w_m·‖v_m‖ / Σ w_m) · φ(Σ w_m·φ(v_m) / Σ w_m),  φ(x) = x / ‖x‖

  of each leaf by itself. Arguments and errors are those of `merge`.
  """
  return merge(contributions, weights, 'rda')


def _by_id(values: Mapping[int, Any] | Sequence[Any]) -> dict[int, Any]:
  return dict(values if isinstance(values, Mapping) else enumerate(values))


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedLeaf:
  """An encoded array of a pytree; a leaf by itself.

  Attributes:
    data: uint8 [bytes], what would be sent.
  """

  data: np.ndarray
  shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TreeCodec:
  """A codec of pytrees of f32 arrays; made by `make_codec`.

  Decoding gives the same bits on every machine. Values that are not finite
  decode to arrays with such values.

  Attributes:
    codec: that of a vector.
  """

  codec: codecs.Codec

  @property
  def name(self) -> str:
    return self.codec.name

  def encode(self, tree: Tree) -> Tree:
    """Returns the tree with an `EncodedLeaf` in place of each array.

    Raises:
      ValueError: an array is not f32.
    """

    def encoded(leaf) -> EncodedLeaf:
      array = np.asarray(leaf)
      vector = np.ascontiguousarray(array).reshape(-1)
      return EncodedLeaf(self.codec.encode(vector), array.shape)

    return jax.tree.map(encoded, tree)

  def decode(self, tree: Tree) -> Tree:
    """Returns what `encode` took, as f32 arrays of the host, rounded.

    Raises:
      ValueError: the bytes are not of this codec.
    """

    def decoded(leaf: EncodedLeaf) -> np.ndarray:
      size = int(np.prod(leaf.shape))
      return self.codec.decode(leaf.data, size).reshape(leaf.shape)

    return jax.tree.map(decoded, tree)

  def nbytes(self, tree: Tree) -> int:
    """Returns the bytes that a tree of arrays, or of shapes, is encoded to."""
    return sum(self.codec.nbytes(int(x.size)) for x in jax.tree.leaves(tree))


def make_codec(
  name: str, block_size: int = 128, scale: str = 'bf16'
) -> TreeCodec:
  """Makes a codec by which fragments travel.

  Args:
    name: 'int1', 'int2', 'int4', 'int8', 'bf16' or 'f32'; and those that
      `diloco.numerics.codec.CODECS` has besides.
    block_size: values that share a scale ('int…' only); smaller is more
      accurate, and larger on the wire.
    scale: type of the scales, 'bf16' or 'f32' ('int…' only).

  Raises:
    ValueError: an argument is out of range; names what would be right.
  """
  return TreeCodec(codecs.make_codec(name, block_size, scale))
