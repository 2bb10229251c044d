# SPDX-License-Identifier: Apache-2.0
"""Converts the lab's array-valued objects to plain JSON and arrays.

An array that occurs in several places is saved once, and restored as one.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from diloco.learner.replica import FragmentReplica
from diloco.numerics.outer import FragmentState
from diloco.run.spec import RunSpec
from diloco.syncer.outer_state import OuterStep

Arrays = Mapping[str, np.ndarray]  # Piece name -> f32 array.
HOST, DEVICE = 'host', 'device'  # Or the axes of the mesh, if it is spread.


@dataclasses.dataclass(frozen=True)
class Donated:
  """The state that a newcomer gets from a donor."""

  held: list[FragmentReplica]  # Θ, by fragment.
  inner: Any  # A copy of the inner optimizer's state.


@dataclasses.dataclass(frozen=True)
class SavedLearner:
  """A learner's own checkpoint."""

  params: dict[str, jax.Array]
  inner: Any
  bases: list[Arrays]


# The words of the file are its own: a class can be renamed.
RECORDS = {
  'Donated': Donated,
  'Saved': SavedLearner,
  'FragmentState': FragmentState,
  'Outcome': OuterStep,
  'Held': FragmentReplica,
}
_WORDS = {cls: word for word, cls in RECORDS.items()}


@dataclasses.dataclass(frozen=True)
class Likes:
  """The structures of a run that can't be told from what was saved."""

  mesh: jax.sharding.Mesh
  trees: Any  # Contains every kind of named tuple that is packed.


class Packer:
  """Splits objects.

  Attributes:
    arrays: name -> array, as a checkpoint takes them.
  """

  def __init__(self):
    self.arrays: dict[str, Any] = {}
    self._names: dict[int, str] = {}  # By identity; `arrays` keeps them alive.

  def plain(self, value: Any) -> Any:
    """Returns JSON from which `Unpacker` restores `value`.

    Raises:
      TypeError: it contains something other than arrays, numbers, text, lists,
        tuples, dicts, and records of the kinds above.
    """
    match value:
      case None | bool() | int() | float() | str():
        return value
      case np.ndarray() | jax.Array():
        return {'array': self._name(value), 'on': _place(value)}
      case dict():
        return {'dict': [[key, self.plain(x)] for key, x in value.items()]}
      case list():
        return [self.plain(x) for x in value]
      case tuple():
        name = type(value).__name__ if hasattr(value, '_fields') else None
        return {'tuple': [self.plain(x) for x in value], 'of': name}
    if type(value) in _WORDS:
      fields = dataclasses.fields(value)
      return {
        'record': {f.name: self.plain(getattr(value, f.name)) for f in fields},
        'of': _WORDS[type(value)],
      }
    raise TypeError(f'{type(value).__name__} can not be saved')

  def _name(self, array) -> str:
    if id(array) not in self._names:
      name = self._names[id(array)] = f'{len(self.arrays):06d}'
      self.arrays[name] = array
    return self._names[id(array)]


class Unpacker:
  """Restores objects."""

  def __init__(self, arrays: Mapping[str, np.ndarray], likes: Likes):
    self._arrays = arrays
    self._mesh = likes.mesh
    self._tuples = dict(_named_tuples(likes.trees))
    self._placed: dict[str, Any] = {}

  def value(self, plain: Any) -> Any:
    """Returns the value that `Packer.plain` was given."""
    match plain:
      case {'array': name, 'on': place}:
        if name not in self._placed:
          self._placed[name] = self._put(self._arrays[name], place)
        return self._placed[name]
      case {'dict': items}:
        return {key: self.value(x) for key, x in items}
      case {'tuple': items, 'of': None}:
        return tuple(self.value(x) for x in items)
      case {'tuple': items, 'of': name}:
        return self._tuples[name](*(self.value(x) for x in items))
      case {'record': fields, 'of': name}:
        values = {key: self.value(x) for key, x in fields.items()}
        return RECORDS[name](**values)
      case list():
        return [self.value(x) for x in plain]
    return plain

  def _put(self, array: np.ndarray, place) -> Any:
    if place == HOST:
      return array
    array = np.array(array)  # A copy: a step may donate it.
    if place == DEVICE:
      return jax.device_put(array)
    axes = (tuple(x) if isinstance(x, list) else x for x in place)
    spec = jax.sharding.PartitionSpec(*axes)
    return jax.device_put(array, jax.sharding.NamedSharding(self._mesh, spec))


def _place(array) -> Any:
  if isinstance(array, np.ndarray):
    return HOST
  if isinstance(array.sharding, jax.sharding.NamedSharding):
    return [list(x) if isinstance(x, tuple) else x for x in array.sharding.spec]
  return DEVICE


def _named_tuples(tree: Any):
  """Yields name and class of each named tuple in a tree."""
  if isinstance(tree, Mapping):
    tree = tuple(tree.values())
  if isinstance(tree, tuple | list):
    if hasattr(tree, '_fields'):
      yield type(tree).__name__, type(tree)
    for each in tree:
      yield from _named_tuples(each)


def on_mesh(run_spec: RunSpec) -> tuple[RunSpec, list[jax.Device]]:
  """Returns as many devices as the mesh needs: here others may be left over."""
  mesh = run_spec.config.mesh
  return run_spec, jax.devices()[: mesh.devices]
