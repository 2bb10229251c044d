# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts: a token goes through the MLPs that a router chooses.

Dropless: an expert takes all tokens that chose it, so that a token's result
does not depend on the others of its batch. If the mesh has several devices,
each has tokens and experts of its own: tokens go to the devices of their
experts along the axis 'expert', and what becomes of them comes back.

Suffixes of arrays give their shape:
  B batch, L length, D d_model, E experts, K top_k, F d_ff, R rows = B·L·K,
  T tokens = B·L.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from diloco.models import api, layers
from diloco.models.decoder_config import DecoderConfig
from diloco.models.routing import Routing, route
from diloco.models.sharding import device_kind, mesh_axis, platform

BLOCKS_PER_EXPERT = 4  # On average; padding adds about a quarter of the rows.
BLOCK_ROWS_MIN = 8


# Gated MLPs of many experts on rows that are sorted by expert.
#
# It uses `jax.lax.ragged_dot`, except on a CPU: there that took 2.3 ms forward
# and 9 to 11 backward, where blocks take 0.5 and 1.5 to 1.9 (one product of
# 1,024 rows, 8 experts and 64×96 matrices, on a busy machine). No accelerator
# has run it yet. On a CPU the rows of each expert fill whole blocks, and a
# block is multiplied with the matrix of its expert.
#
# Suffixes of arrays give their shape:
#   R rows, E experts, D d_model, F d_ff, B blocks, S rows of a block, 1 one.


def mlps(
  x_RD: jax.Array,
  sizes_E: jax.Array,
  gate_EDF: jax.Array,
  up_EDF: jax.Array,
  down_EFD: jax.Array,
) -> jax.Array:
  """down_e(silu(gate_e(x)) · up_e(x)) of each row's expert e.

  Args:
    x_RD: rows, sorted by expert.
    sizes_E: int32, number of rows of each expert; further rows belong to none.
    gate_EDF: in the dtype of the rows.
    up_EDF: in the dtype of the rows.
    down_EFD: in the dtype of the rows.

  Returns:
    [R, D]; 0 for a row that belongs to no expert.
  """
  return jax.lax.platform_dependent(
    x_RD,
    sizes_E,
    gate_EDF,
    up_EDF,
    down_EFD,
    cpu=by_blocks,
    default=by_ragged_dot,
  )


def by_ragged_dot(x_RD, sizes_E, gate_EDF, up_EDF, down_EFD) -> jax.Array:
  """Computes `mlps` by `jax.lax.ragged_dot`."""
  has_expert_R1 = (jnp.arange(x_RD.shape[0]) < jnp.sum(sizes_E))[:, None]

  def product(rows, matrices):
    # A backend may leave garbage in the rows of no expert.
    out = jax.lax.ragged_dot(rows, matrices, sizes_E)
    return jnp.where(has_expert_R1, out, 0)

  gate_RF, up_RF = product(x_RD, gate_EDF), product(x_RD, up_EDF)
  return product(jax.nn.silu(gate_RF) * up_RF, down_EFD)


def by_blocks(x_RD, sizes_E, gate_EDF, up_EDF, down_EFD) -> jax.Array:
  """Computes `mlps` by blocks of rows."""
  rows, width = x_RD.shape
  experts = sizes_E.shape[0]
  block = max(BLOCK_ROWS_MIN, rows // (BLOCKS_PER_EXPERT * experts))
  blocks = rows // block + experts  # Enough, however the rows are spread.
  ends_E = jnp.cumsum(sizes_E)
  block_ends_E = jnp.cumsum(-(-sizes_E // block))
  # Row r of expert e is shifted by the padding of all experts before e. A row
  # of no expert goes beyond the end, and is dropped.
  shifts_E = block * (block_ends_E - -(-sizes_E // block)) - (ends_E - sizes_E)
  owner_R = jnp.searchsorted(ends_E, jnp.arange(rows), side='right')
  slot_R = jnp.arange(rows) + shifts_E.at[owner_R].get(
    mode='fill', fill_value=blocks * block
  )
  padded_BSD = (
    jnp.zeros((blocks * block, width), x_RD.dtype)
    .at[slot_R]
    .set(x_RD, mode='drop', unique_indices=True)
    .reshape(blocks, block, width)
  )
  # A block beyond the last holds zeros: any expert will do.
  owner_B = jnp.searchsorted(block_ends_E, jnp.arange(blocks), side='right')
  owner_B = jnp.minimum(owner_B, experts - 1)
  gate_BSF = jnp.einsum('BSD,BDF->BSF', padded_BSD, gate_EDF[owner_B])
  up_BSF = jnp.einsum('BSD,BDF->BSF', padded_BSD, up_EDF[owner_B])
  y_BSD = jnp.einsum(
    'BSF,BFD->BSD', jax.nn.silu(gate_BSF) * up_BSF, down_EFD[owner_B]
  )
  return (
    y_BSD.reshape(-1, width)
    .at[slot_R]
    .get(mode='fill', fill_value=0, unique_indices=True)
  )


class Experts(nnx.Module):
  """Σ over the chosen experts of gate_e · down_e(silu(gate_e(x)) · up_e(x))."""

  def __init__(self, config: DecoderConfig, key: jax.Array):
    width, d_ff, experts = config.d_model, config.d_ff, config.experts.experts
    keys = jax.random.split(key, 4)
    std = 1 / math.sqrt(width)
    self.config = config
    self.top_k = config.experts.top_k
    self.norm = layers.stacked_scale(config)
    self.router = layers.stacked_normal(
      keys[0], (width, experts), std, ('embed', 'router')
    )
    if config.experts.bias_rate:
      self.router_bias = nnx.Param(
        jnp.zeros((experts,)), axes=('layers', None), role=api.AVERAGED
      )
    else:
      self.router_bias = None
    wide, back = ('experts', 'embed', 'mlp'), ('experts', 'mlp', 'embed')
    self.gate = layers.stacked_normal(
      keys[1], (experts, width, d_ff), std, wide
    )
    self.up = layers.stacked_normal(keys[2], (experts, width, d_ff), std, wide)
    self.down = layers.stacked_normal(
      keys[3],
      (experts, d_ff, width),
      layers.residual_std(d_ff, config.layers),
      back,
    )

  def __call__(self, x_BLD: jax.Array) -> tuple[jax.Array, Routing]:
    x_BLD = layers.rms_norm(x_BLD, self.norm[...], self.config)
    bias_E = None if self.router_bias is None else self.router_bias[...]
    # In f32 whatever the dtype: rounding a logit may change a choice.
    logits_BLE = jnp.einsum(
      'BLD,DE->BLE', x_BLD.astype(jnp.float32), self.router[...]
    )
    routing = routed(logits_BLE, bias_E, self.top_k)
    y_BLD = spread(
      x_BLD,
      routing.chosen_BLK,
      routing.gates_BLK,
      *(
        matrix[...].astype(self.config.dtype)
        for matrix in (self.gate, self.up, self.down)
      ),
    )
    return y_BLD, routing


def routed(
  logits_BLE: jax.Array, bias_E: jax.Array | None, top_k: int
) -> Routing:
  """Computes `route`, each device for its tokens.

  Left to the partitioner, the top-k would gather all logits on every device.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return route(logits_BLE, bias_E, top_k)
  rows, whole = _rows(mesh, logits_BLE), PartitionSpec()

  @functools.partial(
    jax.shard_map,
    in_specs=(rows, whole),
    out_specs=Routing(rows, rows, rows, rows, whole),
  )
  def of_device(logits_BLE, bias_E):
    return route(logits_BLE, bias_E, top_k)

  return of_device(logits_BLE, bias_E)


def _rows(mesh, x_BLX: jax.Array) -> PartitionSpec:
  """Returns how the tokens of an activation are spread."""
  batch, length, _ = x_BLX.shape
  return PartitionSpec(
    mesh_axis(mesh, 'batch', batch), mesh_axis(mesh, 'length', length)
  )


def spread(
  x_BLD: jax.Array,
  chosen_BLK: jax.Array,
  gates_BLK: jax.Array,
  *matrices: jax.Array,
) -> jax.Array:
  """Σ_k gate_k · mlp_k(x); each device for its tokens, by others' experts.

  Args:
    chosen_BLK: the experts of each token.
    gates_BLK: f32, their weights.
    matrices: gate [E, D, F], up [E, D, F] and down [E, F, D].
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    y_BLD = _asked(None, x_BLD, chosen_BLK, gates_BLK, *matrices)
    return y_BLD.astype(x_BLD.dtype)
  rows = _rows(mesh, x_BLD)
  of_experts = mesh_axis(mesh, 'experts', matrices[0].shape[0])
  of_mlp = mesh_axis(mesh, 'mlp', matrices[0].shape[-1])

  @functools.partial(
    jax.shard_map,
    in_specs=(
      rows,
      rows,
      rows,
      PartitionSpec(of_experts, None, of_mlp),
      PartitionSpec(of_experts, None, of_mlp),
      PartitionSpec(of_experts, of_mlp, None),
    ),
    out_specs=rows,
    # With the check, jax 0.10.2 silently gave wrong gradients of the tokens
    # here; the cause is unknown. A test compares with one device.
    check_vma=False,
  )
  def of_device(*arrays):
    part_BLD = _asked(of_experts, *arrays)
    return jax.lax.psum(part_BLD, of_mlp) if of_mlp else part_BLD

  y_BLD = of_device(x_BLD, chosen_BLK, gates_BLK, *matrices)
  return y_BLD.astype(x_BLD.dtype)


def _asked(
  axis: str | None,
  x_BLD: jax.Array,
  chosen_BLK: jax.Array,
  gates_BLK: jax.Array,
  *matrices: jax.Array,
) -> jax.Array:
  """Σ_k gate_k · mlp_k(x) of the tokens here.

  Args:
    axis: the mesh axis over which the experts are spread; None: all are here.
    chosen_BLK: indices among all experts.
    gates_BLK: weights of the chosen experts.
    matrices: of the experts that are here.

  Returns:
    f32 [B, L, D].
  """
  batch, length, width = x_BLD.shape
  top_k = chosen_BLK.shape[-1]
  experts = matrices[0].shape[0] * (jax.lax.axis_size(axis) if axis else 1)
  expert_R = chosen_BLK.reshape(-1)
  order_R = jnp.argsort(expert_R)  # Stable.
  x_RD = x_BLD.reshape(-1, width)[order_R // top_k]
  sizes_E = jnp.bincount(expert_R, length=experts).astype(jnp.int32)
  if axis is None:
    y_RD = mlps(x_RD, sizes_E, *matrices)
  else:
    y_RD = _elsewhere(axis, x_RD, sizes_E, *matrices)
  y_TKD = y_RD[jnp.argsort(order_R)].reshape(-1, top_k, width)
  y_TD = jnp.einsum(
    'TKD,TK->TD', y_TKD.astype(jnp.float32), gates_BLK.reshape(-1, top_k)
  )
  return y_TD.reshape(batch, length, width)


# Rows go to the devices of their experts, and come back.
#
# No row is dropped, so that a device has room for all rows of all devices: as
# many as it would take with copied tokens. Where the backend can, only rows
# that there are travel; others send the room.
#
# Suffixes of arrays give their shape:
#   R rows, S source devices, O devices of experts, E experts, H experts of one
#   device.


def _elsewhere(axis: str, x_RD, sizes_E, *matrices) -> jax.Array:
  """Computes `mlps` of rows whose experts are spread over an axis."""
  rows, width = x_RD.shape
  here, me = matrices[0].shape[0], jax.lax.axis_index(axis)
  sizes_SE = jax.lax.all_gather(sizes_E, axis)
  sent_SO = sizes_SE.reshape(*sizes_SE.shape[:1], -1, here).sum(axis=2)
  x_SRD = _exchange(axis, x_RD, sent_SO)
  own_SH = jax.lax.dynamic_slice_in_dim(sizes_SE, me * here, here, axis=1)
  # A row beyond those that were sent belongs to none.
  owner_SR = jax.vmap(
    lambda ends_H: jnp.searchsorted(ends_H, jnp.arange(rows), side='right')
  )(jnp.cumsum(own_SH, axis=1))
  order = jnp.argsort(owner_SR.reshape(-1))  # Stable.
  y = mlps(x_SRD.reshape(-1, width)[order], own_SH.sum(axis=0), *matrices)
  y_SRD = y[jnp.argsort(order)].reshape(x_SRD.shape)
  return _return(axis, y_SRD, sent_SO)


def _sends_rows_alone() -> bool:
  """Returns True where a ragged all-to-all compiles: XLA has none for CPUs, and
  libtpu none for the wiring of a v5e or v6e.
  """
  return platform() != 'cpu' and 'lite' not in device_kind()


def _starts(axis: str, sent_SO: jax.Array) -> jax.Array:
  """Returns where in this device's rows those for each device begin."""
  own_O = sent_SO[jax.lax.axis_index(axis)]
  return jnp.cumsum(own_O) - own_O


def _exchange(axis: str, x_RD: jax.Array, sent_SO: jax.Array) -> jax.Array:
  """Sends rows, sorted by device; returns [S, R, D], each source's first."""
  rows, width = x_RD.shape
  devices = sent_SO.shape[0]
  me, starts_O = jax.lax.axis_index(axis), _starts(axis, sent_SO)
  if _sends_rows_alone():
    room = jnp.zeros((devices * rows, width), x_RD.dtype)
    into_O = jnp.full((devices,), me * rows, jnp.int32)
    x = jax.lax.ragged_all_to_all(
      x_RD, room, starts_O, sent_SO[me], into_O, sent_SO[:, me], axis_name=axis
    )
    return x.reshape(devices, rows, width)
  at_OR = starts_O[:, None] + jnp.arange(rows)[None, :]
  x_ORD = x_RD.at[at_OR].get(mode='fill', fill_value=0)
  return jax.lax.all_to_all(x_ORD, axis, 0, 0)


def _return(axis: str, y_SRD: jax.Array, sent_SO: jax.Array) -> jax.Array:
  """Sends results back; the inverse of `_exchange`."""
  devices, rows, width = y_SRD.shape
  me, starts_O = jax.lax.axis_index(axis), _starts(axis, sent_SO)
  if _sends_rows_alone():
    own_S = sent_SO[:, me]
    froms_S = jnp.arange(devices, dtype=jnp.int32) * rows
    # Where each source keeps the rows that it sent here.
    into_S = (jnp.cumsum(sent_SO, axis=1) - sent_SO)[:, me]
    return jax.lax.ragged_all_to_all(
      y_SRD.reshape(-1, width),
      jnp.zeros((rows, width), y_SRD.dtype),
      froms_S,
      own_S,
      into_S,
      sent_SO[me],
      axis_name=axis,
    )
  y_ORD = jax.lax.all_to_all(y_SRD, axis, 0, 0)
  ends_O = starts_O + sent_SO[me]
  row_R = jnp.arange(rows)
  device_R = jnp.searchsorted(ends_O, row_R, side='right')
  return y_ORD[device_R, row_R - starts_O[device_R]]
