# SPDX-License-Identifier: Apache-2.0
"""Replaces fields of frozen dataclasses that change at every event."""

from typing import TypeVar

Value = TypeVar('Value')


def changed(value: Value, **fields) -> Value:
  """Does what `dataclasses.replace` does, without checks, in a tenth of the
  time.

  A machine changes several values at each inner step, and a swarm test runs
  millions of steps.
  """
  copy = object.__new__(value.__class__)
  values = value.__dict__ | fields
  assert len(values) == len(value.__dict__), f'{fields=} of {value}'
  object.__setattr__(copy, '__dict__', values)
  return copy
