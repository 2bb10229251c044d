# SPDX-License-Identifier: Apache-2.0
"""Formulas for the host memory that learner and syncer use.

They cover one process each, excluding Python, jax and the data:
  N parameters that it holds, of the learner's N if its hosts share them;
  F of those in the largest fragment, N/P if fragments are even;
  S bytes of inner optimizer state, 8N with AdamW;
  b bytes of a value on the wire, M learners, P fragments.
"""

import dataclasses
from collections.abc import Iterable, Iterator

from diloco.protocol.config import UPDATES_KEPT

F32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of a host for one purpose, with the formula."""

  what: str
  formula: str
  nbytes: float


def lines(items: Iterable[Memory]) -> Iterator[str]:
  """Yields a line of text for each purpose, of at most 72 columns."""
  for item in items:
    yield f'  {item.what:40}{item.formula:20}{in_bytes(item.nbytes):>9}'


def in_bytes(nbytes: float) -> str:
  """Bytes in three digits, such as '33.6 GB'; one GB is 10⁹ bytes."""
  for unit, scale in (('TB', 1e12), ('GB', 1e9), ('MB', 1e6), ('kB', 1e3)):
    if nbytes >= scale:
      return f'{nbytes / scale:.3g} {unit}'
  return f'{nbytes:.0f} B'


def count(number: float) -> str:
  """A number in four digits, such as '12 B'; one B is 10⁹."""
  for unit, scale in (('T', 1e12), ('B', 1e9), ('M', 1e6)):
    if number >= scale:
      return f'{number / scale:.4g} {unit}'
  return f'{number:,.0f}'


def rounds(number: int) -> str:
  """Returns text such as '2 rounds'."""
  return f'{number} round' + ('s' if number > 1 else '')


def of_learner(
  n: float, f: float, s: float, b: float, ahead: int
) -> tuple[Memory, ...]:
  """See `learner/replica.py`, `transfers.py`, `peer_bootstrap.py`,
  `held_state.py`.

  Args:
    ahead: rounds that may be in flight.
  """
  return (
    # Bases are the same arrays: what is applied becomes the base.
    Memory('Θ, which the bases share', '4N', F32_BYTES * n),
    # Snapshot and delta; what is decoded and what is rebuilt of an update.
    Memory(
      f'{rounds(ahead)} in flight',
      f'4·4F + {ahead + 1}·bF',
      (4 * F32_BYTES + (ahead + 1) * b) * f,
    ),
    # On CPUs a second set of buffers, kept; else the copy that is written.
    Memory('θ and its state again, to save', '4N + S', F32_BYTES * n + s),
    # Θ as bytes, the inner state, and the same in one piece.
    Memory('giving its state to a newcomer', '4N + 2S', F32_BYTES * n + 2 * s),
    Memory("taking a donor's state, once", '8N + 2S', 2 * (F32_BYTES * n + s)),
  )


def of_syncer(
  n: float, f: float, b: float, ahead: int, learners: int, moments: int = 1
) -> tuple[Memory, ...]:
  """See `syncer/outer_state.py`, `server.py`, `learner_sessions.py`.

  Args:
    ahead: rounds that may be in flight.
    moments: arrays of N in the outer optimizer's state.
  """
  return (
    Memory(
      'Θ, outer optimizer, residual',
      f'{(2 + moments) * F32_BYTES}N',
      (2 + moments) * F32_BYTES * n,
    ),
    Memory(
      f'contributions of {rounds(ahead)}',
      f'{ahead}·M·4F',
      ahead * learners * F32_BYTES * f,
    ),
    # Δ, u, what is wanted and sent, the next Θ_p and residual.
    Memory('the outer step', '6·4F', 6 * F32_BYTES * f),
    # Until they are fetched; and where a link is too slow for the run, the last
    # of each fragment, which learners of one host share.
    Memory(
      'updates on offer',
      f'{ahead}·M·bF + {UPDATES_KEPT}·bN',
      ahead * learners * b * f + UPDATES_KEPT * b * n,
    ),
    # Arrays of numpy are written as they are; the momentum is of jax.
    Memory('its checkpoint, while it is written', '4N', F32_BYTES * n),
  )
