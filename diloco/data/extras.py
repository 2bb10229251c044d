# SPDX-License-Identifier: Apache-2.0
"""Optional packages; a missing one is reported with its extra."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needed(extra: str, what: str) -> Iterator[None]:
  """Wraps imports of packages from an extra of setup.py.

  Args:
    extra: name of the extra.
    what: what needs it, such as "data.source='parquet'".

  Raises:
    ValueError: a package is not installed; says how to install it.
  """
  try:
    yield
  except ImportError as error:
    raise ValueError(
      f"{what} needs {error.name or error}: pip install 'diloco[{extra}]'"
    ) from None
