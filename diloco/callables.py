# SPDX-License-Identifier: Apache-2.0
"""Modules whose name is that of a function of the library, too.

Python makes a module an attribute of its package once it is imported, so that
`diloco.lab` is the package as soon as anything has imported a part of it.
Called, it is the function all the same.
"""

import importlib
import inspect
import sys
import types


class CallableModule(types.ModuleType):
  """A module that passes calls on; see `make_callable`."""

  def __call__(self, *args, **kwargs):
    return self.__wrapped__(*args, **kwargs)

  @property
  def __wrapped__(self):
    package, _, name = self.__name__.rpartition('.')
    place, _, attribute = sys.modules[package].PLACES[name].partition(':')
    return getattr(importlib.import_module(place), attribute)

  @property
  def __signature__(self) -> inspect.Signature:
    return inspect.signature(self.__wrapped__)


def make_callable(name: str) -> None:
  """Makes the module of that name the function that its package lists.

  Args:
    name: the module's `__name__`; one that is run as a command stays as it is.
  """
  if name != '__main__':
    sys.modules[name].__class__ = CallableModule
