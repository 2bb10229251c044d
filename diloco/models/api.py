# SPDX-License-Identifier: Apache-2.0
"""The interface of a model: two functions, two tables.

Any `init` and `loss` on nested dicts of arrays will do; nothing here depends on
Flax. Only drawing text and scoring answers need a third function, `logits`. A
parameter's *path* is its keys joined by '/', such as 'layers/attention/query'.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PLAIN = 'plain'  # One tensor; merged as such.
STACKED = 'stacked'  # Axis 0 counts layers; each slice is a logical tensor.
EMBEDDING = 'embedding'  # Axis 0 counts rows; may be cut between rows.
# It is moved by its own gradient, and merged by plain means.
AVERAGED = 'averaged'
# Neither trained nor exchanged: the same on all learners, as it was read from
# `model.init_from`, or drawn.
FROZEN = 'frozen'
ROLES = (PLAIN, STACKED, EMBEDDING, AVERAGED, FROZEN)

CROSS_ENTROPY = 'cross_entropy'  # The metric that `reported_loss` looks for.
# The metric by which losses of several batches, or of parts of one, are
# weighted: over how many predictions each is a mean. Without it all weigh the
# same.
COUNTED = 'counted'

Params = dict[str, Any]  # Nested; the leaves are arrays.
Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]


class Language(NamedTuple):
  """Functions of a language model that score texts and continue them.

  Attributes:
    entropies: (params, tokens) -> f32 [B, L], −log p(token i + 1 | 0 … i), for
      int32 tokens [B, L + 1].
    start: (params, tokens, lengths) -> (logits, cache). `tokens` is int32
      [B, L], of which those from `lengths` [B] on are ignored; logits, f32
      [B, V], are of what follows; the cache has room for L tokens of each row.
    go_on: (params, token, cache) -> (logits, cache), of one more token a row,
      int32 [B]. If there is no room, the oldest is forgotten.
  """

  entropies: Callable[[Params, jax.Array], jax.Array]
  start: Callable[[Params, jax.Array, jax.Array], tuple[jax.Array, Any]]
  go_on: Callable[[Params, jax.Array, Any], tuple[jax.Array, Any]]


class Model(NamedTuple):
  """A model, as learners and the lab see it.

  Attributes:
    init: key -> params.
    loss: (params, batch, key) -> (loss, metrics). `batch['tokens']` is int32
      [B, L+1]; 'segments', of documents that are kept apart, is int32 [B, L+1]
      and ascends along a row; 'counted', of dialogues, is int32 [B, L+1]: 1
      where the prediction of that token counts, else 0. The loss is an f32
      scalar, the mean next-token cross-entropy in nats over B·L predictions, or
      those of them that are within segments and count, 0 if none does; metrics
      are f32 scalars by name. If the loss has more terms, the cross-entropy
      alone is its metric 'cross_entropy': see `reported_loss`. If it is a mean
      over some of the predictions, their number is its metric 'counted'.
    axes: path -> the logical name of each axis, None for one never sharded.
      `sharding.RULES` maps the names to mesh axes.
    roles: path -> 'plain', 'stacked' or 'embedding': how the parameter may be
      cut into fragments. Or 'averaged', for a parameter that no optimizer
      touches: an inner step subtracts its gradient unscaled, and Θ's is the
      learners' weighted mean. Or 'frozen', for one that stays as it is: Θ and
      its fragments are of the others alone.
    logits: (params, tokens) -> f32 [B, L, V] for int32 tokens [B, L]; position
      i sees the tokens 0 … i, and predicts the next one. None for a model that
      is not a language model: training needs its loss alone.
    language: what evaluation needs, with a cache; see `language_of`.
  """

  init: Callable[[jax.Array], Params]
  loss: Callable[[Params, Batch, jax.Array], tuple[jax.Array, Metrics]]
  axes: Mapping[str, tuple[str | None, ...]]
  roles: Mapping[str, str]
  logits: Callable[[Params, jax.Array], jax.Array] | None = None
  language: Language | None = None


def language_of(model: Model) -> Language | None:
  """Returns what scores texts and continues them; None if nothing does.

  Of a model with `logits` alone it is made of these: all of a text is read
  again for each token that is drawn.
  """
  if model.language or not model.logits:
    return model.language

  def entropies(params, tokens_BL):
    logits_BLV = model.logits(params, tokens_BL[:, :-1])
    chances_BLV = jax.nn.log_softmax(logits_BLV.astype(jnp.float32), axis=-1)
    at_BL1 = tokens_BL[:, 1:, None]
    return -jnp.take_along_axis(chances_BLV, at_BL1, axis=-1)[..., 0]

  def start(params, tokens_BL, lengths_B):
    logits_BLV = model.logits(params, tokens_BL)
    last_B11 = lengths_B[:, None, None] - 1
    logits_B1V = jnp.take_along_axis(logits_BLV, last_B11, axis=1)
    return logits_B1V[:, 0], (tokens_BL, lengths_B)

  def go_on(params, token_B, cache):
    tokens_BL, lengths_B = cache
    room = tokens_BL.shape[1]
    full_B1 = (lengths_B == room)[:, None]
    tokens_BL = jnp.where(full_B1, jnp.roll(tokens_BL, -1, 1), tokens_BL)
    lengths_B = jnp.minimum(lengths_B + 1, room)
    is_new_BL = jnp.arange(room)[None, :] == lengths_B[:, None] - 1
    tokens_BL = jnp.where(is_new_BL, token_B[:, None], tokens_BL)
    return start(params, tokens_BL, lengths_B)

  return Language(entropies, start, go_on)


def reported_loss(loss: jax.Array, metrics: Metrics) -> jax.Array:
  """Returns the loss to report and compare: without auxiliary terms.

  Args:
    metrics: metrics of the same call.
  """
  return metrics.get(CROSS_ENTROPY, loss)


def plain_model(
  init: Callable[[jax.Array], Params],
  loss: Callable[[Params, Batch, jax.Array], tuple[jax.Array, Metrics]],
  *,
  axes: Mapping[str, tuple[str | None, ...]] | None = None,
  roles: Mapping[str, str] | None = None,
  logits: Callable[[Params, jax.Array], jax.Array] | None = None,
) -> Model:
  """Makes a model of two functions; the tables need only list exceptions.

  A parameter that `axes` does not name is replicated on every device; one that
  `roles` does not name is one tensor. Nothing is computed.

  Args:
    axes: see `Model`; some paths.
    roles: see `Model`; some paths.

  Raises:
    ValueError: the parameters are not nested dicts of arrays.
  """
  shapes = flatten(jax.eval_shape(lambda: init(jax.random.key(0))))
  whole = {path: (None,) * len(leaf.shape) for path, leaf in shapes.items()}
  return Model(
    init=init,
    loss=loss,
    axes={**whole, **(axes or {})},
    roles={**dict.fromkeys(shapes, PLAIN), **(roles or {})},
    logits=logits,
  )


def flatten(params: Params) -> dict[str, Any]:
  """Returns path -> leaf, in sorted order of the paths' keys.

  Raises:
    ValueError: A container is not a dict, a key not a string without '/', or a
      dict is empty: such a tree could not be rebuilt from its paths.
  """
  flat = {}
  _flatten_into(flat, (), params)
  return flat


def unflatten(flat: Mapping[str, Any]) -> Params:
  """Returns the nested dict whose `flatten` is `flat`."""
  params: Params = {}
  for path, leaf in flat.items():
    *parents, name = path.split('/')
    node = params
    for parent in parents:
      node = node.setdefault(parent, {})
    node[name] = leaf
  return params


def check_model(model: Model) -> dict[str, jax.ShapeDtypeStruct]:
  """Checks that the tables fit the parameters; computes nothing.

  Returns:
    Path -> shape and dtype of every parameter.

  Raises:
    ValueError: A table misses a parameter or names an unknown one, or a rank or
      a role is wrong. The text lists every fault.
  """
  # The key is made inside: outside it would be an array on a device.
  shapes = flatten(jax.eval_shape(lambda: model.init(jax.random.key(0))))
  broken = list(_broken_tables(model, shapes))
  if broken:
    raise ValueError('model: ' + '; '.join(broken))
  return shapes


def check_loss(model: Model, batch: int, seq_len: int):
  """Checks the result of `loss` for a batch of tokens; computes nothing.

  Args:
    model: a model that passes `check_model`.

  Raises:
    ValueError: it is not a pair of an f32 scalar and a dict of scalars.
  """
  tokens = jax.ShapeDtypeStruct((batch, seq_len + 1), jnp.int32)

  def first_loss(tokens):
    draw, key = jax.random.split(jax.random.key(0))
    return model.loss(model.init(draw), {'tokens': tokens}, key)

  result = jax.eval_shape(first_loss, tokens)
  if not (isinstance(result, tuple) and len(result) == 2):
    raise ValueError(
      f'model: loss gives {result}, must give the pair (loss, metrics)'
    )
  loss, metrics = result
  if getattr(loss, 'shape', None) != () or loss.dtype != jnp.float32:
    raise ValueError(f'model: the loss is {loss}, must be an f32 scalar')
  if not isinstance(metrics, dict) or any(
    getattr(x, 'shape', None) != () for x in metrics.values()
  ):
    raise ValueError(
      f'model: the metrics are {metrics}, must be a dict of scalars by name'
    )


def _flatten_into(flat: dict[str, Any], keys: tuple[str, ...], node: Any):
  where = '/'.join(keys) or 'params'
  if isinstance(node, dict):
    if not node:
      raise ValueError(f'{where} is an empty dict')
    for key in sorted(node, key=str):
      if not isinstance(key, str) or '/' in key or not key:
        raise ValueError(
          f"{where} has the key {key!r}; keys are strings without '/'"
        )
      _flatten_into(flat, (*keys, key), node[key])
  elif keys and hasattr(node, 'shape'):
    flat['/'.join(keys)] = node
  else:
    raise ValueError(
      f'{where} is a {type(node).__name__}; params are nested dicts of arrays'
    )


def _broken_tables(model: Model, shapes: Mapping[str, jax.ShapeDtypeStruct]):
  for table in ('axes', 'roles'):
    paths = getattr(model, table).keys()
    for path in sorted(shapes.keys() - paths):
      yield f'{table} misses {path!r}'
    for path in sorted(paths - shapes.keys()):
      yield f'{table} names {path!r}, which is no parameter'
  for path, shape in shapes.items():
    axes = model.axes.get(path)
    role = model.roles.get(path)
    if axes is not None and len(axes) != len(shape.shape):
      yield f'axes of {path!r} are {axes}, its shape is {shape.shape}'
    if role is not None and role not in ROLES:
      yield f'role of {path!r} is {role!r}, must be one of {ROLES}'
    if role in (STACKED, EMBEDDING) and not shape.shape:
      yield f'role of {path!r} is {role!r}, but it is a scalar'
