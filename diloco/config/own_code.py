# SPDX-License-Identifier: Apache-2.0
"""Functions of the user's own, which a configuration names as module:function.

The author of the configuration decides what is imported; no message does.
`docs/extending.md` says what such a function takes and gives, by key.
"""

import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from diloco.protocol.config import names_own

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
NAME = 'experiments'
# An installation holds them in the package, a checkout beside it.
EXPERIMENTS = next(
  (path for path in (PACKAGE / NAME, PACKAGE.parent / NAME) if path.is_dir()),
  PACKAGE / NAME,
)


def parts(value: str) -> tuple[str, str] | None:
  """Returns module and function that a value names; None: it names none."""
  if not names_own(value):
    return None
  module, _, name = value.partition(':')
  return module, name


def make(key: str, value: str, *given, check: Callable[[Any], Any]) -> Any:
  """Returns what the function that `value` names makes, as `check` returns it.

  Modules are found as usual in Python, and in the working directory. No device
  is touched, unless the function or its result does so.

  Args:
    key: such as 'model.kind'.
    value: such as 'package.module:function'.
    *given: the arguments of the function.
    check: takes what the function gives; returns what is used of it, or raises
      ValueError.

  Raises:
    ValueError: no such module or function, or it does not take these arguments,
      or what it gives fails the check; begins with key and value. Other errors
      of the function are passed on, with a note of key and value.
  """
  where = f'{key}={value!r}'
  function = _find(where, *parts(value))
  _check_takes(where, function, given)
  try:
    return check(function(*given))
  except ValueError as error:
    raise ValueError(f'{where}: {error}') from error
  except Exception as error:
    error.add_note(f'It is raised by or for {where}.')
    raise


def _find(where: str, module: str, name: str) -> Callable:
  make_searchable()
  make_importable()  # As where its file was read.
  try:
    imported = importlib.import_module(module)
  except ModuleNotFoundError as error:
    raise ValueError(
      f'{where}: {error}; modules are looked for in {os.getcwd()} and where '
      'Python looks'
    ) from None
  function = getattr(imported, name, None)
  if not callable(function):
    raise ValueError(f'{where}: {imported.__file__} has no function {name}')
  return function


def _check_takes(where: str, function: Callable, given: tuple):
  try:
    signature = inspect.signature(function)
  except ValueError:  # Such as of compiled code.
    return
  try:
    signature.bind(*given)
  except TypeError as error:
    kinds = ', '.join(type(each).__name__ for each in given)
    raise ValueError(
      f'{where}: takes {signature}, must take ({kinds}): {error}'
    ) from None


def make_searchable() -> None:
  """Makes the modules of the working directory importable.

  `python -m` has it on the path; a notebook may not.
  """
  if os.getcwd() not in sys.path:
    sys.path.append(os.getcwd())


def make_importable(path: str = '') -> None:
  """Makes `experiments` importable, for a file that may import it.

  A package of that name of the user's own goes before, unless the file is one
  of those that come with diloco.
  """
  if NAME in sys.modules:
    return
  spec = importlib.util.find_spec(NAME)
  if spec is not None and spec.origin is not None:
    is_ours = pathlib.Path(path).resolve().is_relative_to(EXPERIMENTS)
    folder = pathlib.Path(spec.origin).resolve().parent
    if folder == EXPERIMENTS or not is_ours:
      return
  try:
    package = importlib.import_module(f'{PACKAGE.name}.{NAME}')
  except ModuleNotFoundError:
    return  # A checkout that is not on the path.
  package.__path__ += list(spec.submodule_search_locations) if spec else []
