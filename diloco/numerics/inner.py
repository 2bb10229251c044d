# SPDX-License-Identifier: Apache-2.0
"""The inner step: one learner's AdamW, generic in model and loss.

The optimizer's updates are not scaled by the learning rate; `TrainStep`
scales them by its argument `lr`. So the schedule can follow the global step of
the whole run, known only at run time, without compiling again.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from diloco.numerics.fragments import TensorSpec

PyTree = Any
Loss = Callable[[PyTree, PyTree, jax.Array], tuple[jax.Array, dict[str, Any]]]


def adamw(
  b1: float = 0.9,
  b2: float = 0.95,
  eps: float = 1e-8,
  weight_decay: float = 0.1,
  clip_norm: float = 1.0,
  specs: Mapping[str, TensorSpec] | None = None,
  moments: str = 'float32',
) -> optax.GradientTransformation:
  """Returns clip by global norm, Adam and decoupled weight decay, in f32.

  Args:
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: per unit of learning rate; tensors with less than two axes
      (norms, biases) do not decay.
    clip_norm: upper bound of the gradient's norm; 0 does not clip.
    specs: the model's tensors. The layer axis of a 'stacked' one is not
      counted, so that the norms of a scanned model count as 1-D. An 'averaged'
      one is left out entirely. None: every axis counts.
    moments: dtype in which both moments are stored between steps.
  """
  chain = optax.chain(
    optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(),
    _stored(optax.scale_by_adam(b1, b2, eps), moments),
    optax.add_decayed_weights(
      weight_decay, mask=lambda params: decays(params, specs)
    ),
  )
  if any(spec.role == 'averaged' for spec in (specs or {}).values()):
    # Its gradient passes through unchanged, and it has no moments.
    chain = optax.masked(
      chain, lambda params: jax.tree.map(operator.not_, averaged(params, specs))
    )
  return optax.GradientTransformation(
    lambda params: chain.init(_f32(params)),
    lambda grads, state, params: chain.update(_f32(grads), state, _f32(params)),
  )


def _stored(
  inner: optax.GradientTransformation, dtype: str
) -> optax.GradientTransformation:
  """Returns the transformation with its f32 state stored in another dtype."""
  if dtype == 'float32':
    return inner

  def cast(state, to):
    return jax.tree.map(
      lambda x: x.astype(to) if jnp.issubdtype(x.dtype, jnp.floating) else x,
      state,
    )

  def update(updates, state, params=None):
    updates, state = inner.update(updates, cast(state, jnp.float32), params)
    return updates, cast(state, dtype)

  return optax.GradientTransformation(
    lambda params: cast(inner.init(params), dtype), update
  )


def decays(
  params: PyTree, specs: Mapping[str, TensorSpec] | None = None
) -> PyTree:
  """Returns which tensors weight decay acts on: those of two axes or more.

  `params` may be flat or nested dicts; `specs` is by path, see `adamw`.
  """

  def decay(path, param) -> bool:
    if specs is None:
      return param.ndim >= 2
    return param.ndim - (specs[_name(path)].role == 'stacked') >= 2

  return jax.tree_util.tree_map_with_path(decay, params)


def averaged(
  params: PyTree, specs: Mapping[str, TensorSpec] | None = None
) -> PyTree:
  """Returns the tensors with the role 'averaged'; arguments as in `decays`."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: bool(specs) and specs[_name(path)].role == 'averaged',
    params,
  )


@dataclasses.dataclass(frozen=True, eq=False)  # Hashed by jit: by identity.
class TrainStep:
  """θ' = θ - lr·update(∇loss(θ)), a function to be jitted.

  An 'averaged' tensor is θ' = θ - ∇loss(θ): its model defines how it moves.

  Attributes:
    loss: (params, batch, rng) -> (scalar, metrics).
    inner: from `optimizers.INNER`; its state is `inner.init(params)`.
    specs: the same as for `adamw`.
    accumulate: see `accumulated`.
    counted: see `accumulated`.
  """

  loss: Loss
  inner: optax.GradientTransformation
  specs: Mapping[str, TensorSpec] | None = None
  accumulate: int = 1
  counted: str | None = None

  def __call__(
    self,
    params: PyTree,
    inner_state: PyTree,
    batch: PyTree,
    lr: jax.Array,
    rng: jax.Array,
  ) -> tuple[PyTree, PyTree, dict[str, jax.Array]]:
    """Takes one step.

    Args:
      params: any pytree of arrays; keeps its dtypes.
      inner_state: from the last step.
      lr: scalar f32, see `schedule`.
      rng: passed to the loss.

    Returns:
      Parameters, inner state, and metrics as f32 scalars: those of the loss,
        'loss', and 'grad_norm' before clipping, over the optimized tensors.
    """
    value, metrics, grads = accumulated(
      self.loss, params, batch, rng, self.accumulate, self.counted
    )
    update, inner_state = self.inner.update(grads, inner_state, params)
    free = averaged(params, self.specs)
    params = jax.tree.map(
      lambda p, u, is_free: (p - (u if is_free else lr * u)).astype(p.dtype),
      params,
      update,
      free,
    )
    optimized = jax.tree.map(
      lambda g, is_free: None if is_free else g, grads, free
    )
    metrics |= {'loss': value, 'grad_norm': optax.tree.norm(_f32(optimized))}
    return params, inner_state, _f32(metrics)


def accumulated(
  loss: Loss,
  params: PyTree,
  batch: PyTree,
  rng: jax.Array,
  parts: int,
  counted: str | None = None,
) -> tuple[jax.Array, dict[str, jax.Array], PyTree]:
  """Returns loss, metrics and gradient of a batch, processed in parts.

  ∇loss(B) = Σ_i c_i · ∇loss(B_i) / Σ_i c_i, where c_i is how many predictions
  the loss of part i is a mean of: the gradient of the whole batch, to rounding,
  with the activations of one part. Part i has the rows i, n + i, 2n + i, …, so
  that each device keeps its own if rows are spread over devices. Metrics are
  means too; what is not a mean over predictions (the balance of experts) is
  averaged over the parts.

  Args:
    batch: axis 0 of each array counts rows; a multiple of `parts`.
    rng: the loss gets it with the part's number folded in, if there are
      several.
    parts: n. 1: the loss is called once, with all arguments.
    counted: the name of c_i among the metrics, of which the sum is returned. If
      it is not there, all parts weigh the same.

  Returns:
    In f32 if there are several parts, otherwise as the loss returns them.
  """
  gradient = jax.value_and_grad(loss, has_aux=True)
  if parts == 1:
    (value, metrics), grads = gradient(params, batch, rng)
    return value, metrics, grads
  split = jax.tree.map(
    lambda x: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0), batch
  )

  def add(sums, part):
    i, rows = part
    (value, metrics), grads = gradient(params, rows, jax.random.fold_in(rng, i))
    told = _f32((value, metrics, grads))
    if counted in metrics:
      count = told[1][counted]
      told = jax.tree.map(lambda x: count * x, told)
      told[1][counted] = count
    return jax.tree.map(jnp.add, sums, told), None

  first = jax.tree.map(lambda x: x[0], split)
  (value, metrics), grads = jax.tree.map(
    lambda x: jnp.zeros(x.shape, jnp.float32),
    jax.eval_shape(gradient, params, first, rng),
  )
  sums, _ = jax.lax.scan(
    add, (value, metrics, grads), (jnp.arange(parts), split)
  )
  if counted not in metrics:
    return jax.tree.map(lambda x: x / parts, sums)
  count = sums[1][counted]
  means = jax.tree.map(lambda x: x / jnp.maximum(count, 1), sums)
  means[1][counted] = count
  return means


def _name(path) -> str:
  return jax.tree_util.keystr(path, simple=True, separator='/')


def _f32(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
