# SPDX-License-Identifier: Apache-2.0
"""Packages that only some data need; a missing one is named with its extra."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needed(extra: str, what: str) -> Iterator[None]:
  """Around the imports of packages of an extra of setup.py.

  Args:
    extra: its name.
    what: needs them, such as "data.source='parquet'".

  Raises:
    ValueError: one is not installed; says how it would be.
  """
  try:
    yield
  except ImportError as error:
    raise ValueError(
      f"{what} needs {error.name or error}: pip install 'diloco[{extra}]'"
    ) from None
