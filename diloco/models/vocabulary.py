# SPDX-License-Identifier: Apache-2.0
"""A decoder's embedding look-up and its cross-entropy, sharded and in chunks.

Neither has the whole table, nor the logits of all tokens, on any device. The
tables lie with their rows over 'vocab' and their columns over 'embed'. For the
rows of tokens, devices exchange tokens and columns of the result, which are
less than the table. The loss takes its tokens in chunks; where a gradient is
wanted, each chunk's is computed beside it, so that logits are made once.

Suffixes of arrays give their shape:
  B batch, L length, D d_model, V vocab, T tokens = B·L, C tokens of a chunk.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from diloco.models import api
from diloco.models.sharding import mesh_axis

# Logits of a chunk on a device: 256 MiB in f32, some 200 tokens of 262,144.
LOGITS_MAX = 1 << 26


@dataclasses.dataclass(frozen=True)
class _Axes:
  """The mesh axes that arrays are cut along; None: not at all."""

  batch: tuple[str, ...] = ()
  vocab: str | None = None
  embed: str | None = None
  length: str | None = None

  @property
  def tokens(self) -> tuple[str, ...]:
    """The mesh axes over which tokens are spread."""
    return (*self.batch, self.length) if self.length else self.batch

  @property
  def rows(self) -> PartitionSpec:
    """The partition of arrays of tokens, [B, L] or with more axes."""
    return PartitionSpec(self.batch or None, self.length)


def _axes(tokens: tuple[int, int], vocab: int, width: int) -> _Axes | None:
  """Returns how arrays of these sizes lie on the mesh; None without one."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return None
  return _Axes(
    mesh_axis(mesh, 'batch', tokens[0]) or (),
    mesh_axis(mesh, 'vocab', vocab),
    mesh_axis(mesh, 'embed', width),
    mesh_axis(mesh, 'length', tokens[1]),
  )


# Rows of tokens -------------------------------------------------------------


def look_up(table_VD: jax.Array, tokens_BL: jax.Array, dtype) -> jax.Array:
  """Returns the tokens' rows of the table, [B, L, D], in `dtype`."""
  axes = _axes(tokens_BL.shape, *table_VD.shape)
  if axes is None:
    return table_VD[tokens_BL].astype(dtype)

  def of_device(table_VD, tokens_BL):
    split = axes.embed in axes.batch
    if split:
      tokens_BL = jax.lax.all_gather(tokens_BL, axes.embed, tiled=True)
    at_BL, here_BL = _local(tokens_BL, table_VD.shape[0], axes.vocab)
    x_BLD = jnp.where(here_BL[..., None], table_VD[at_BL], 0).astype(dtype)
    if split:
      x_BLD = jax.lax.all_to_all(x_BLD, axes.embed, 0, 2, tiled=True)
    elif axes.embed:
      x_BLD = jax.lax.all_gather(x_BLD, axes.embed, axis=2, tiled=True)
    return jax.lax.psum(x_BLD, axes.vocab) if axes.vocab else x_BLD

  return jax.shard_map(
    of_device,
    in_specs=(PartitionSpec(axes.vocab, axes.embed), axes.rows),
    out_specs=axes.rows,
    check_vma=False,
  )(table_VD, tokens_BL)


def _local(tokens, vocab: int, axis: str | None) -> tuple[jax.Array, jax.Array]:
  """Returns the tokens' places among the rows here, and whether they are."""
  first = jax.lax.axis_index(axis) * vocab if axis else 0
  at = tokens - first
  here = (at >= 0) & (at < vocab)
  return jnp.where(here, at, 0), here


# The loss -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Loss:
  """A cross-entropy over the vocabulary, in nats and f32.

  Attributes:
    cap: logits s become cap · tanh(s / cap); 0: they stay.
    z_weight: weight of mean (log Σ_v exp(logit_v))², which keeps them small.
  """

  cap: float = 0.0
  z_weight: float = 0.0

  def __call__(
    self,
    x_BLD: jax.Array,
    head_VD: jax.Array,
    targets_BL: jax.Array,
    counted_BL: jax.Array | None = None,
  ) -> tuple[jax.Array, api.Metrics]:
    """mean of log Σ_v exp(logit_v) − logit_target, over what is counted.

    Args:
      x_BLD: in the dtype of the products.
      head_VD: f32; logits are x · headᵀ.
      counted_BL: bool; None: all.

    Returns:
      The loss; as metrics the share of targets that were the likeliest token,
      the cross-entropy alone if there is a z-loss, and the number of what is
      counted if that is not all.
    """
    metrics = {}
    if counted_BL is None:
      shares_BL = jnp.full(targets_BL.shape, 1 / targets_BL.size, jnp.float32)
    else:
      counted_BL = counted_BL.astype(jnp.float32)
      metrics[api.COUNTED] = jnp.sum(counted_BL)
      shares_BL = counted_BL / jnp.maximum(metrics[api.COUNTED], 1)
    loss, entropy, right = _loss(self, x_BLD, head_VD, targets_BL, shares_BL)
    metrics['accuracy'] = right
    if self.z_weight:
      metrics[api.CROSS_ENTROPY] = entropy
    return loss, metrics

  def of_tokens(
    self, x_BLD: jax.Array, head_VD: jax.Array, targets_BL: jax.Array
  ) -> jax.Array:
    """Returns log Σ_v exp(logit_v) − logit_target of each token, [B, L]."""
    shares_BL = jnp.zeros(targets_BL.shape, jnp.float32)
    return _on_mesh(self, False, x_BLD, head_VD, targets_BL, shares_BL)[1]

  def capped(self, logits: jax.Array) -> jax.Array:
    """Returns the logits as the loss takes them."""
    return self.cap * jnp.tanh(logits / self.cap) if self.cap else logits


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(loss: Loss, x_BLD, head_VD, targets_BL, shares_BL):
  """Returns loss, cross-entropy and share of right ones; the first has a
  gradient.
  """
  return _on_mesh(loss, False, x_BLD, head_VD, targets_BL, shares_BL)[0]


def _loss_with_gradients(loss: Loss, x_BLD, head_VD, targets_BL, shares_BL):
  values, _, gradients = _on_mesh(
    loss, True, x_BLD, head_VD, targets_BL, shares_BL
  )
  return values, gradients


def _scale_gradients(loss: Loss, gradients, by):
  del loss
  dx_BLD, dhead_VD = gradients
  return (by[0] * dx_BLD).astype(dx_BLD.dtype), by[0] * dhead_VD, None, None


_loss.defvjp(_loss_with_gradients, _scale_gradients)


def _on_mesh(loss: Loss, differ: bool, x_BLD, head_VD, targets_BL, shares_BL):
  """Returns the values, the entropy of each token, and the gradients of x and
  head, if asked for.
  """
  axes = _axes(x_BLD.shape[:2], *head_VD.shape)
  if axes is None:
    return _of_device(
      loss, differ, _Axes(), x_BLD, head_VD, targets_BL, shares_BL
    )
  rows, table = axes.rows, PartitionSpec(axes.vocab, axes.embed)
  return jax.shard_map(
    functools.partial(_of_device, loss, differ, axes),
    in_specs=(rows, table, rows, rows),
    out_specs=((PartitionSpec(),) * 3, rows, (rows, table) if differ else None),
    check_vma=False,
  )(x_BLD, head_VD, targets_BL, shares_BL)


def _of_device(
  loss: Loss, differ: bool, axes: _Axes, x_BLD, head_VD, targets_BL, shares_BL
):
  """Computes `_on_mesh` for the tokens and the part of the vocabulary here."""
  dtype, width = x_BLD.dtype, x_BLD.shape[-1]
  head_VD = head_VD.astype(dtype)
  if axes.embed:
    head_VD = jax.lax.all_gather(head_VD, axes.embed, axis=1, tiled=True)
  rows = x_BLD.reshape(-1, width), targets_BL.reshape(-1), shares_BL.reshape(-1)
  tokens, vocab = rows[0].shape[0], head_VD.shape[0]
  count = -(-tokens * vocab // LOGITS_MAX)
  size = -(-tokens // count)
  chunk = functools.partial(_chunk, loss, differ, axes.vocab, head_VD)
  if count == 1:
    told_3T, dx_TD, dhead_VD = chunk(*rows)
  else:
    # What fills the last chunk has the share 0.
    fill = [(0, size * count - tokens)]
    chunks = tuple(
      jnp.pad(x, fill + [(0, 0)] * (x.ndim - 1)).reshape(
        count, size, *x.shape[1:]
      )
      for x in rows
    )

    def add(sum_VD, chunk_rows):
      told_3C, dx_CD, dhead_VD = chunk(*chunk_rows)
      return jax.tree.map(jnp.add, sum_VD, dhead_VD), (told_3C, dx_CD)

    zeros = jnp.zeros(head_VD.shape) if differ else None
    dhead_VD, (told_N3C, dx_CD) = jax.lax.scan(add, zeros, chunks)
    told_3T = jnp.swapaxes(told_N3C, 0, 1).reshape(3, -1)[:, :tokens]
    dx_TD = dx_CD.reshape(-1, width)[:tokens] if differ else None
  values = jnp.sum(rows[2][None] * told_3T, axis=1)
  entropy_BL = told_3T[0].reshape(targets_BL.shape)
  if axes.tokens:
    values = jax.lax.psum(values, axes.tokens)
  entropy, square, right = values
  values = entropy + loss.z_weight * square, entropy, right
  if not differ:
    return values, entropy_BL, None
  if axes.vocab:
    dx_TD = jax.lax.psum(dx_TD, axes.vocab)
  dhead_VD = _summed(dhead_VD, axes)
  return values, entropy_BL, (dx_TD.reshape(x_BLD.shape), dhead_VD)


def _summed(dhead_VD: jax.Array, axes: _Axes) -> jax.Array:
  """Sums the head's gradient over the tokens; returns the columns kept here."""
  others = tuple(axis for axis in axes.tokens if axis != axes.embed)
  if axes.embed in axes.batch:
    dhead_VD = jax.lax.psum_scatter(
      dhead_VD, axes.embed, scatter_dimension=1, tiled=True
    )
  if others:
    dhead_VD = jax.lax.psum(dhead_VD, others)
  if axes.embed and axes.embed not in axes.batch:
    width = dhead_VD.shape[1] // jax.lax.axis_size(axes.embed)
    first = jax.lax.axis_index(axes.embed) * width
    dhead_VD = jax.lax.dynamic_slice_in_dim(dhead_VD, first, width, 1)
  return dhead_VD


def _chunk(
  loss: Loss,
  differ: bool,
  axis: str | None,
  head_VD: jax.Array,
  x_CD: jax.Array,
  targets_C: jax.Array,
  shares_C: jax.Array,
):
  """Returns what is told of some tokens, and gradients of its mean.

  Args:
    axis: the mesh axis that cuts the vocabulary.
    head_VD: the rows here, in the dtype of x.

  Returns:
    f32 [3, C]: cross-entropy, (log Σ exp)², and 1 for a right one; the gradient
    of x in its dtype and that of the head in f32, or None.
  """

  def over_vocab(reduce, x):
    return reduce(x, axis) if axis else x

  wide = {'preferred_element_type': jnp.float32}
  logits_CV = loss.capped(jnp.einsum('CD,VD->CV', x_CD, head_VD, **wide))
  top_C = over_vocab(jax.lax.pmax, jnp.max(logits_CV, axis=-1))
  powers_CV = jnp.exp(logits_CV - top_C[:, None])
  sum_C = over_vocab(jax.lax.psum, jnp.sum(powers_CV, axis=-1))
  log_C = top_C + jnp.log(sum_C)
  at_C, here_C = _local(targets_C, head_VD.shape[0], axis)
  found_C = jnp.take_along_axis(logits_CV, at_C[:, None], axis=1)[:, 0]
  target_C = over_vocab(jax.lax.psum, jnp.where(here_C, found_C, 0.0))
  told_3C = jnp.stack(
    [
      log_C - target_C,
      jnp.square(log_C),
      (target_C >= top_C).astype(sum_C.dtype),
    ]
  )
  if not differ:
    return told_3C, None, None
  per_C = shares_C * (1 + 2 * loss.z_weight * log_C) / sum_C
  hit_CV = (
    jnp.arange(head_VD.shape[0])[None, :]
    == jnp.where(here_C, at_C, -1)[:, None]
  )
  dlogits_CV = powers_CV * per_C[:, None]
  dlogits_CV -= jnp.where(hit_CV, shares_C[:, None], 0.0)
  if loss.cap:
    dlogits_CV *= 1 - jnp.square(logits_CV / loss.cap)
  dlogits_CV = dlogits_CV.astype(x_CD.dtype)
  dx_CD = jnp.einsum('CV,VD->CD', dlogits_CV, head_VD)
  dhead_VD = jnp.einsum('CV,CD->VD', dlogits_CV, x_CD, **wide)
  return told_3C, dx_CD, dhead_VD


def logits(x_BLD: jax.Array, head_VD: jax.Array) -> jax.Array:
  """x · headᵀ of few tokens, f32 [B, L, V]."""
  return jnp.einsum(
    'BLD,VD->BLV',
    x_BLD,
    head_VD.astype(x_BLD.dtype),
    preferred_element_type=jnp.float32,
  )
