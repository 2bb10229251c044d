# SPDX-License-Identifier: Apache-2.0
"""Causal attention by name: what computes it, and what it needs memory for.

  xla     products and a softmax; the scores, [L, L] of each head, are stored.
  splash  the Pallas kernel for TPUs that JAX comes with: blocks of scores in
          the chip's own memory, and none for blocks that are masked.
  cudnn   cuDNN's kernel for GPUs of NVIDIA.

All compute the same to rounding. A query sees the keys at its own place and
before it, of its own segment, and of the last `window` places.

Suffixes of arrays give their shape:
  B batch, L length, N heads, K kv_heads, G query heads of a key head, H
  head_dim, R rows = G·L, S keys: L, or the room for them.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from diloco.models.decoder_config import ATTENTIONS, AUTO
from diloco.models.sharding import (
  CONTEXT,
  constrain,
  is_cut,
  mesh_axis,
  platform,
)

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
# Of the kernel's blocks; a multiple of a TPU's 128 lanes divides the length.
LANES, BLOCK_MAX = 128, 512
OF_PADDING = -1  # The segment of what is appended to fill the last block.


@dataclasses.dataclass(frozen=True)
class Visible:
  """Which keys count for a query of causal attention, and how their scores do.

  Attributes:
    window: places, its own included; 0: all before it.
    cap: scores s become cap · tanh(s / cap); 0: they stay.
    segments_BL: int32; None: a row is one segment.
  """

  window: int = 0
  cap: float = 0.0
  segments_BL: jax.Array | None = None


def attend(
  name: str,
  q_BLNH: jax.Array,
  k_BLKH: jax.Array,
  v_BLKH: jax.Array,
  visible: Visible,
) -> jax.Array:
  """softmax(q · kᵀ / √H) · v over the visible keys, f32 inside.

  Args:
    name: a key of `ATTENTIONS`, or 'auto'.
    k_BLKH: each of its heads serves N / K query heads, in order.

  Returns:
    [B, L, N, H] in the dtype of v.
  """
  if name == AUTO:
    asked = platform(), str(q_BLNH.dtype), visible.cap
    name = next(each for each, kind in ATTENTIONS.items() if kind.runs(*asked))
  return _COMPUTE[name](q_BLNH, k_BLKH, v_BLKH, visible)


def by_xla(q_BLNH, k_BLKH, v_BLKH, visible: Visible) -> jax.Array:
  """Computes `attend` by two products, of all query heads of a key head."""
  batch, length, heads, width = q_BLNH.shape
  kv_heads = k_BLKH.shape[2]
  if is_cut(CONTEXT):  # A device has some of the queries, and all keys.
    k_BLKH, v_BLKH = (
      constrain(x, 'batch', None, 'kv_heads', None) for x in (k_BLKH, v_BLKH)
    )
  group = heads // kv_heads
  q_BLKGH = q_BLNH.reshape(batch, length, kv_heads, group, width)
  q_BKRH = q_BLKGH.transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, width)
  scores_BKRS = jnp.einsum(
    'BKRH,BSKH->BKRS', q_BKRH, k_BLKH, preferred_element_type=jnp.float32
  )
  split = batch, kv_heads, group, length, length
  shares_BKGLS = _shares(
    scores_BKRS.reshape(split), _mask(length, visible), width, visible.cap
  )
  shares_BKRS = shares_BKGLS.reshape(scores_BKRS.shape)
  y_BKRH = jnp.einsum(
    'BKRS,BSKH->BKRH', shares_BKRS.astype(v_BLKH.dtype), v_BLKH
  )
  y_BKGLH = y_BKRH.reshape(batch, kv_heads, group, length, width)
  return y_BKGLH.transpose(0, 3, 1, 2, 4).reshape(q_BLNH.shape)


def _shares(scores, seen, width: int, cap: float) -> jax.Array:
  """Returns the softmax of q · kᵀ / √width over the keys that are seen."""
  scores /= math.sqrt(width)
  if cap:
    scores = cap * jnp.tanh(scores / cap)
  return jax.nn.softmax(jnp.where(seen, scores, MASKED))


def _mask(length: int, visible: Visible) -> jax.Array:
  """Returns whether a query sees a key, to be broadcast to [B, K, G, L, S]."""
  places = jnp.arange(length)
  back_LS = places[:, None] - places[None, :]
  seen_LS = back_LS >= 0
  if visible.window:
    seen_LS &= back_LS < visible.window
  seen_BLS = seen_LS[None]
  if visible.segments_BL is not None:
    ids = visible.segments_BL
    seen_BLS &= ids[:, :, None] == ids[:, None, :]
  return seen_BLS[:, None, None]


def by_splash(q_BLNH, k_BLKH, v_BLKH, visible: Visible) -> jax.Array:
  """Computes `attend` by splash attention; on a CPU it is interpreted."""
  mesh = jax.sharding.get_abstract_mesh()
  batch, length, heads, width = q_BLNH.shape
  segments_BL = visible.segments_BL
  # A device has the queries of a part of the sequence, and all keys.
  parts = mesh.shape.get(CONTEXT, 1)
  if pad := -length % (LANES * parts):
    rows = ((0, 0), (0, pad))
    if segments_BL is None:
      segments_BL = jnp.zeros((batch, length), jnp.int32)
    segments_BL = jnp.pad(segments_BL, rows, constant_values=OF_PADDING)
    q_BLNH, k_BLKH, v_BLKH = (
      jnp.pad(x, (*rows, (0, 0), (0, 0))) for x in (q_BLNH, k_BLKH, v_BLKH)
    )
  # The kernel does not scale.
  q_BLNH = q_BLNH * jnp.asarray(1 / math.sqrt(width), q_BLNH.dtype)

  def of_device(kernel, q_BLNH, k_BLKH, v_BLKH, *segments):
    y_BNLH = jax.vmap(kernel)(
      *(jnp.swapaxes(x, 1, 2) for x in (q_BLNH, k_BLKH, v_BLKH)),
      *([_ids(*segments)] if segments else []),
    )
    return jnp.swapaxes(y_BNLH, 1, 2)

  operands = (q_BLNH, k_BLKH, v_BLKH)
  operands += () if segments_BL is None else (segments_BL, segments_BL)
  if mesh.empty or mesh.size == 1:
    kernel = _kernel(length + pad, heads, 1, visible)
  else:
    rows = mesh_axis(mesh, 'batch', batch)
    # Each device has whole groups, or all.
    of_heads = mesh_axis(mesh, 'kv_heads', k_BLKH.shape[2])
    here = heads // (mesh.shape[of_heads] if of_heads else 1)
    kernel = _kernel(length + pad, here, parts, visible)
    queries = PartitionSpec(rows, CONTEXT, of_heads)
    keys = PartitionSpec(rows, None, of_heads)
    specs = (
      kernel.manual_sharding_spec(
        NamedSharding(mesh, PartitionSpec(None, CONTEXT))
      ),
      *(queries, keys, keys),
      *(PartitionSpec(rows, CONTEXT), PartitionSpec(rows, None)),
    )
    of_device = jax.shard_map(
      of_device,
      in_specs=specs[: 1 + len(operands)],
      out_specs=queries,
      check_vma=False,  # The kernel does not say over what its result varies.
    )
  return of_device(kernel, *operands)[:, :length].astype(v_BLKH.dtype)


def _ids(queries_BL: jax.Array, keys_BS: jax.Array):
  from jax.experimental.pallas.ops.tpu import splash_attention

  return splash_attention.SegmentIds(queries_BL, keys_BS)


def _kernel(length: int, heads: int, parts: int, visible: Visible) -> Callable:
  """Returns the kernel for the heads of a device and one row.

  Args:
    parts: of a sequence, each with its part of the mask.
  """
  # Pallas takes a third of a second to import, which most processes need not.
  from jax.experimental.pallas.ops.tpu import splash_attention
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
  )

  shape = length, length
  if visible.window:
    mask = masks.LocalMask(shape, (visible.window - 1, 0), 0, parts)
  else:
    mask = masks.CausalMask(shape, 0, parts)
  block = math.gcd(length // parts, BLOCK_MAX)
  names = (
    'block_q', 'block_kv', 'block_kv_compute',
    'block_q_dkv', 'block_kv_dkv', 'block_kv_dkv_compute',
    'block_q_dq', 'block_kv_dq',
  )  # fmt: skip
  return splash_attention.make_splash_mha(
    masks.MultiHeadMask([mask] * heads),
    head_shards=1,
    q_seq_shards=parts,
    block_sizes=splash_attention.BlockSizes(**dict.fromkeys(names, block)),
    attn_logits_soft_cap=visible.cap or None,
    interpret=platform() == 'cpu',
  )


def by_cudnn(q_BLNH, k_BLKH, v_BLKH, visible: Visible) -> jax.Array:
  """Computes `attend` by cuDNN, which has no cap."""
  mask = None
  if visible.segments_BL is not None:
    mask = _mask(q_BLNH.shape[1], dataclasses.replace(visible, window=0))[:, 0]
  return jax.nn.dot_product_attention(
    q_BLNH,
    k_BLKH,
    v_BLKH,
    mask=mask,
    is_causal=True,
    local_window_size=(visible.window - 1, 0) if visible.window else None,
    implementation='cudnn',
  )


def by_cache(
  q_B1NH: jax.Array,
  keys_BSKH: jax.Array,
  values_BSKH: jax.Array,
  at_B: jax.Array,
  visible: Visible,
) -> jax.Array:
  """Computes `attend` of one query a row, over a ring of keys.

  Args:
    keys_BSKH: key p lies at p mod S; of those of one place the newest.
    values_BSKH: lie as the keys do.
    at_B: int32, the place of each query, whose own key is there.
    visible: without segments.

  Returns:
    [B, 1, N, H] in the dtype of the values.
  """
  batch, room, kv_heads, width = keys_BSKH.shape
  q_BKGH = q_B1NH.reshape(batch, kv_heads, -1, width)
  scores_BKGS = jnp.einsum(
    'BKGH,BSKH->BKGS', q_BKGH, keys_BSKH, preferred_element_type=jnp.float32
  )
  back_BS = (at_B[:, None] - jnp.arange(room)[None, :]) % room
  seen_BS = back_BS <= at_B[:, None]  # Others are of no token yet.
  if visible.window:
    seen_BS &= back_BS < visible.window
  shares_BKGS = _shares(scores_BKGS, seen_BS[:, None, None], width, visible.cap)
  y_BKGH = jnp.einsum(
    'BKGS,BSKH->BKGH', shares_BKGS.astype(values_BSKH.dtype), values_BSKH
  )
  return y_BKGH.reshape(q_B1NH.shape)


_COMPUTE = {'splash': by_splash, 'cudnn': by_cudnn, 'xla': by_xla}
assert _COMPUTE.keys() == ATTENTIONS.keys()
