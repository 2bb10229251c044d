# SPDX-License-Identifier: Apache-2.0
"""The inner step: one learner's optimizer, generic in model and loss.

The optimizer's updates are not scaled by the learning rate; `TrainStep`
scales them by its argument `lr`. So the schedule can follow the global step of
the whole run, known only at run time, without compiling again.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

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
  adam = _stored(optax.scale_by_adam(b1, b2, eps), moments)
  return _clipped_and_decayed(adam, weight_decay, clip_norm, specs)


MUON_DECAY = 0.95  # Of the momentum, as its authors have it.
# Root mean square of the updates of a matrix: about that of AdamW's, so that
# one learning rate and one weight decay suit both (Liu et al., 2025).
MUON_RMS = 0.2
# Logical axes of tensors that turn no vector of the width into another.
NO_MATRIX = frozenset({'norm', 'router', 'vocab'})


def muon(
  b1: float,
  b2: float,
  eps: float,
  weight_decay: float,
  clip_norm: float,
  specs: Mapping[str, TensorSpec],
  axes: Mapping[str, tuple[str | None, ...]],
  moments: str = 'float32',
) -> optax.GradientTransformation:
  """Returns Muon for matrices, and `adamw` for all else.

  Both are clipped by one global norm, and decay alike. The matrices of a layer,
  and of an expert, are orthogonalised one by one; those with heads as [embed,
  heads · head_dim]. See `matrix_axes` for what is a matrix.

  Args:
    b1, b2, eps, weight_decay, clip_norm, moments: as of `adamw`; the momentum
      of the matrices is stored like the moments, and decays by `MUON_DECAY`.
    specs: the model's tensors.
    axes: the logical name of each of their axes.

  Raises:
    ValueError: there is no matrix.
  """
  matrices = {
    path: found
    for path, spec in specs.items()
    if (found := matrix_axes(spec, axes[path])) is not None
  }
  if not matrices:
    raise ValueError(
      "no parameter is a matrix for Muon; inner.optimizer='adamw' takes them "
      'as they are'
    )
  numbers = {
    path: contrib.MuonDimensionNumbers(*each) for path, each in matrices.items()
  }

  def numbers_of(params):
    return {path: numbers.get(path, optax.MaskedNode()) for path in params}

  def scaled(path, update):
    sizes = (
      math.prod(specs[_name(path)].shape[i] for i in side)
      for side in matrices[_name(path)]
    )
    return MUON_RMS * math.sqrt(max(sizes)) * update

  core = optax.partition(
    {
      'muon': optax.chain(
        contrib.scale_by_muon(
          beta=MUON_DECAY,
          eps=eps,
          mu_dtype=moments,
          weight_dimension_numbers=numbers_of,
        ),
        optax.stateless(
          lambda updates, _: jax.tree_util.tree_map_with_path(scaled, updates)
        ),
      ),
      'adam': _stored(optax.scale_by_adam(b1, b2, eps), moments),
    },
    lambda params: {
      path: 'muon' if path in numbers else 'adam' for path in params
    },
  )
  return _clipped_and_decayed(core, weight_decay, clip_norm, specs)


def matrix_axes(
  spec: TensorSpec, names: tuple[str | None, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
  """Returns the axes that a tensor, as a matrix, sums over and puts out.

  All others count matrices: layers, experts. A tensor of more axes is a matrix
  where its first or its last is the model's width, 'embed'. None: it is none,
  as are embeddings, norms and what has an axis of `NO_MATRIX`.

  Args:
    names: the logical name of each axis.
  """
  if spec.role in ('embedding', 'averaged') or NO_MATRIX.intersection(names):
    return None
  first, *others = [
    i
    for i, name in enumerate(names)
    if name != 'experts' and not (spec.role == 'stacked' and i == 0)
  ] or [0]
  if not others:
    return None
  if len(others) == 1 or names[first] == 'embed':
    return (first,), tuple(others)
  if names[others[-1]] == 'embed':
    return (first, *others[:-1]), (others[-1],)
  return None


def settings_of(section) -> dict[str, Any]:
  """Returns the arguments of `adamw` and `muon` from the section `inner`."""
  keys = ('b1', 'b2', 'eps', 'weight_decay', 'clip_norm', 'moments')
  return {key: getattr(section, key) for key in keys}


def check_inner(
  optimizer: optax.GradientTransformation, specs: Mapping[str, TensorSpec]
) -> optax.GradientTransformation:
  """Checks an optimizer of the user's own; computes nothing.

  Args:
    specs: the model's tensors.

  Returns:
    The optimizer in f32; 'averaged' tensors never reach it.

  Raises:
    ValueError: it is no transformation, or its updates are not like the
      parameters, or its state changes its form.
  """
  if not (hasattr(optimizer, 'init') and hasattr(optimizer, 'update')):
    raise ValueError(
      f'gave a {type(optimizer).__name__}, must give an '
      'optax.GradientTransformation'
    )
  optimizer = _of_optimized(optimizer, specs)

  def step(params):
    state = optimizer.init(params)
    return state, *optimizer.update(params, state, params)

  params = {
    path: jax.ShapeDtypeStruct(spec.shape, jnp.float32)
    for path, spec in specs.items()
  }
  state, update, after = jax.eval_shape(step, params)
  for what, found, like in (
    ('update', update, params),
    ('state', after, state),
  ):
    if jax.tree.structure(found) != jax.tree.structure(like):
      raise ValueError(
        f'its {what} is {jax.tree.structure(found)}, must be '
        f'{jax.tree.structure(like)}'
      )
    leaves = zip(
      jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(like)
    )
    for (path, x), y in leaves:
      if (x.shape, x.dtype) != (y.shape, y.dtype):
        raise ValueError(
          f'its {what} of {_name(path)} is {x.dtype} {x.shape}, must be '
          f'{y.dtype} {y.shape}'
        )
  return optimizer


def _clipped_and_decayed(
  core: optax.GradientTransformation,
  weight_decay: float,
  clip_norm: float,
  specs: Mapping[str, TensorSpec] | None,
) -> optax.GradientTransformation:
  chain = optax.chain(
    optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(),
    core,
    optax.add_decayed_weights(
      weight_decay, mask=lambda params: decays(params, specs)
    ),
  )
  return _of_optimized(chain, specs)


def _of_optimized(
  chain: optax.GradientTransformation, specs: Mapping[str, TensorSpec] | None
) -> optax.GradientTransformation:
  """Returns the transformation in f32, of all but the 'averaged' tensors."""
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
