# SPDX-License-Identifier: Apache-2.0
"""Cuts a model into P fragments, and takes and puts their pieces.

The unit is the *logical tensor*: if layers are stacked for `scan`, each layer's
slice is one, or 24 even fragments could not exist. Logical tensors are never
split, except for embedding-like ones, which merge elementwise and may therefore
be cut by rows. That is our choice: the paper has the embedding as a fragment of
its own (Fig. 8). Every learner and the syncer build the same layout from the
same shapes, and compare fingerprints.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # The configuration reads `SCHEMES` without jax.
  import jax

Array = 'np.ndarray | jax.Array'
Params = Mapping[str, Array]  # path -> array, such as 'layers/mlp/up'.

ROLES = ('plain', 'stacked', 'embedding', 'averaged')


@dataclasses.dataclass(frozen=True)
class TensorSpec:
  """The shape and the role of one array of the model.

  Attributes:
    shape: the array's shape; it holds at least one element.
    role: 'plain'; 'stacked' (axis 0 is the layer); 'embedding' (embedding and
      output head: axis 0 is the vocabulary); or 'averaged' (one tensor that
      neither the inner nor the outer optimizer touches).
  """

  shape: tuple[int, ...]
  role: str = 'plain'

  def __post_init__(self):
    if self.role not in ROLES:
      raise ValueError(f'role={self.role!r}, must be one of {ROLES}')
    if math.prod(self.shape) < 1:
      raise ValueError(f'shape={self.shape} holds no element')
    if self.role != 'plain' and not self.shape:
      raise ValueError(f'a scalar has no axis 0; role={self.role!r} needs one')


@dataclasses.dataclass(frozen=True)
class Piece:
  """The part of one array in one fragment: all of it, a layer, or some rows."""

  path: str
  layer: int | None  # Index on axis 0 of a stacked array.
  rows: tuple[int, int] | None  # First row, row after the last.
  shape: tuple[int, ...]  # Shape of the piece, not of the array.
  role: str

  @property
  def name(self) -> str:
    """Name, unique in a layout: 'norm', 'layers/mlp/up[3]', 'embed[0:64]'."""
    if self.layer is not None:
      return f'{self.path}[{self.layer}]'
    if self.rows is not None:
      return f'{self.path}[{self.rows[0]}:{self.rows[1]}]'
    return self.path

  @property
  def size(self) -> int:
    """Number of values in the piece."""
    return math.prod(self.shape)

  @property
  def index(self) -> tuple[Any, ...]:
    """Index such that `array[piece.index]` is the piece, always as an array."""
    if self.layer is not None:
      return (self.layer, ...)
    if self.rows is not None:
      return (slice(*self.rows), ...)
    return (...,)

  def box(self, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns where it is in its array, whose shape is given."""
    whole = tuple((0, n) for n in shape)
    if self.layer is not None:
      return ((self.layer, self.layer + 1), *whole[1:])
    return (self.rows, *whole[1:]) if self.rows is not None else whole


Pieces = Sequence[Piece]


@dataclasses.dataclass(frozen=True)
class Layout:
  """P fragments: every element of the model is in exactly one of them."""

  fragments: tuple[tuple[Piece, ...], ...]  # Ordered by path, layer, rows.

  @property
  def sizes(self) -> tuple[int, ...]:
    """Values per fragment."""
    return tuple(sum(p.size for p in pieces) for pieces in self.fragments)

  def fingerprint(self) -> str:
    """Returns 16 hex digits that differ if anything in the layout differs."""
    text = json.dumps(dataclasses.asdict(self), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_layout(
  specs: Mapping[str, TensorSpec],
  scheme: str,
  fragments: int,
  embedding: str = 'split',
) -> Layout:
  """Distributes the logical tensors over P fragments (the paper's Fig. 8-10).

  Args:
    specs: the model; the order of the mapping does not matter.
    scheme: 'balanced': largest first, each into the lightest fragment, ties
      by name and lowest fragment; the largest fragment is at most 4/3 of the
      best possible. 'tensor': one after another, round robin. 'layer': whole
      layers, neighbours together; tensors outside the layers go to the last.
    embedding: 'split' gives every fragment an even share of the rows of the
      embedding-like tensors; 'own' makes them fragment 0 and distributes the
      rest over P - 1 (the paper).

  Raises:
    ValueError: a fragment would be empty, or a scheme lacks its tensors.
  """
  tables = [
    _whole(path, spec)
    for path, spec in sorted(specs.items())
    if spec.role == 'embedding'
  ]
  tensors = _logical_tensors(specs)
  own, shared = EMBEDDINGS[embedding].place(tables, fragments)
  if tensors and not shared:
    raise ValueError(
      f'embedding={embedding!r} leaves none of fragments={fragments} to '
      f"{len(tensors)} other tensors; use embedding='split' or more fragments"
    )
  if shared:
    SCHEMES[scheme](shared, tensors)
  bins = own + shared
  empty = [i for i, pieces in enumerate(bins) if not pieces]
  if empty:
    raise ValueError(
      f'fragments={fragments} is too many for scheme={scheme!r}: '
      f'{len(tensors)} logical tensors beside {len(tables)} embedding-like '
      f'ones leave fragments {empty} empty'
    )
  return Layout(tuple(tuple(sorted(b, key=_order)) for b in bins))


def take(params: Params, pieces: Pieces) -> dict[str, Array]:
  """Returns the pieces by name; views of numpy arrays, not copies.

  Raises:
    ValueError: an array has not the shape of the layout.
  """
  taken = {piece.name: params[piece.path][piece.index] for piece in pieces}
  for piece in pieces:
    _check_shape(piece, taken[piece.name])
  return taken


def put(params: Params, pieces: Pieces, arrays: Params) -> dict[str, Array]:
  """Returns numpy `params` with the pieces replaced, in their dtype.

  Pure: arrays of `params` that change are copied, once each; the others are
  shared.

  Raises:
    ValueError: an array has not the shape of its piece.
  """
  result = dict(params)
  for path in {piece.path for piece in pieces}:
    result[path] = result[path].copy()
  for piece in pieces:
    _check_shape(piece, arrays[piece.name])
    result[piece.path][piece.index] = arrays[piece.name]
  return result


def change(
  params: Params, piece: Piece, rule: 'Callable[[jax.Array], jax.Array]'
) -> dict[str, Array]:
  """Returns `params` with `rule(piece)` in place of a piece, for use under
  `jit`.

  With donation XLA does it in place, without any copy. `put` after `take` would
  copy the array, since XLA does not see then that each piece is read before it
  is written.

  Args:
    params: jax arrays.
    rule: maps the piece to its new value; a layer's piece has a leading axis of
      size 1.
  """
  from jax import lax

  array = params[piece.path]
  if piece.layer is None:
    part = array[piece.index]
    changed = array.at[piece.index].set(rule(part).astype(array.dtype))
  else:
    part = lax.dynamic_slice_in_dim(array, piece.layer, 1)
    changed = lax.dynamic_update_slice_in_dim(
      array, rule(part).astype(array.dtype), piece.layer, 0
    )
  return {**params, piece.path: changed}


def _check_shape(piece: Piece, array: Array):
  if array.shape != piece.shape:
    raise ValueError(
      f'{piece.name}: shape={array.shape}, must be {piece.shape}'
    )


def _order(piece: Piece):
  return piece.path, piece.layer or 0, piece.rows or (0, 0)


def _whole(path: str, spec: TensorSpec) -> Piece:
  return Piece(path, None, None, tuple(spec.shape), spec.role)


def _logical_tensors(specs: Mapping[str, TensorSpec]) -> list[Piece]:
  """Returns all tensors but the embedding-like, ordered by path, then layer."""
  tensors = []
  for path, spec in sorted(specs.items()):
    if spec.role in ('plain', 'averaged'):
      tensors.append(_whole(path, spec))
    elif spec.role == 'stacked':
      layers, *shape = spec.shape
      tensors += [
        Piece(path, layer, None, tuple(shape), spec.role)
        for layer in range(layers)
      ]
  return tensors


def _rows(table: Piece, i: int, parts: int) -> list[Piece]:
  """Returns part i of the rows; no piece if there are fewer rows than parts."""
  rows, *rest = table.shape
  start, stop = i * rows // parts, (i + 1) * rows // parts
  if parts == 1:
    return [table]
  if start == stop:
    return []
  shape = (stop - start, *rest)
  return [dataclasses.replace(table, rows=(start, stop), shape=shape)]


def _balanced(bins: list[list[Piece]], tensors: list[Piece]):
  """Fills the bins by size, largest first.

  This is LPT scheduling, whose peak is ≤ 4/3 - 1/(3P) of the optimum.
  """
  loads = [sum(piece.size for piece in pieces) for pieces in bins]
  for piece in sorted(tensors, key=lambda p: (-p.size, *_order(p))):
    lightest = loads.index(min(loads))
    bins[lightest].append(piece)
    loads[lightest] += piece.size


def _round_robin(bins: list[list[Piece]], tensors: list[Piece]):
  """Deals layer by layer, as the model computes; others come first."""
  by_layer = sorted(tensors, key=lambda p: (p.layer is not None, p.layer or 0))
  for i, piece in enumerate(by_layer):
    bins[i % len(bins)].append(piece)


def _layers(bins: list[list[Piece]], tensors: list[Piece]):
  layers = 1 + max(
    (p.layer for p in tensors if p.layer is not None), default=-1
  )
  if not layers:
    raise ValueError("scheme='layer' needs tensors with role 'stacked'")
  for piece in tensors:
    outside = piece.layer is None
    group = len(bins) - 1 if outside else piece.layer * len(bins) // layers
    bins[group].append(piece)


# Each adds tensors to fragments, in place.
SCHEMES = {'balanced': _balanced, 'tensor': _round_robin, 'layer': _layers}


@dataclasses.dataclass(frozen=True)
class Embedding:
  """A place for the embedding-like tensors.

  Attributes:
    place: takes these and P; returns fragments of their own, which come first,
      and the others, to which the scheme adds all other tensors.
    cuts_rows: True if a fragment has some of the rows of a tensor only.
  """

  place: Callable[[list[Piece], int], tuple[list, list]]
  cuts_rows: bool = False


def _split(tables: list[Piece], fragments: int) -> tuple[list, list]:
  return [], [
    [piece for table in tables for piece in _rows(table, i, fragments)]
    for i in range(fragments)
  ]


def _own(tables: list[Piece], fragments: int) -> tuple[list, list]:
  if not tables:
    raise ValueError("embedding='own', but no tensor has role 'embedding'")
  return [tables], [[] for _ in range(fragments - 1)]


EMBEDDINGS = {
  'split': Embedding(_split, cuts_rows=True),
  'own': Embedding(_own),
}
