# SPDX-License-Identifier: Apache-2.0
"""What learner and syncer keep in the memory of their hosts, as formulas.

N parameters, P fragments, M learners, b bytes of a value on the wire; of one
process each, besides what Python, jax and the data take.
"""

import dataclasses

from diloco.protocol.config import ProtocolConfig
from diloco.studies.situation import Situation

F32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of a host for one purpose, with the formula."""

  what: str
  formula: str
  nbytes: float


def of_learner(
  situation: Situation, protocol: ProtocolConfig, b: float
) -> tuple[Memory, ...]:
  """See `runtime/host_copy.py`, `carrier.py`, `donations.py`, `training.py`."""
  n, p, ahead = situation.params, protocol.fragments, protocol.inflight_max
  state = situation.state_bytes_per_param
  inner = state - F32_BYTES
  return (
    # Bases are the same arrays: what is applied becomes the base.
    Memory('Θ, which the bases share', '4N', F32_BYTES * n),
    # Snapshot and delta; what is decoded and what is rebuilt of an update.
    Memory(
      f'{ahead} rounds in flight',
      f'4·4N/P + {ahead + 1}·bN/P',
      (4 * F32_BYTES + (ahead + 1) * b) * n / p,
    ),
    Memory('its checkpoint, while it is written', f'{state:g}N', state * n),
    # Θ as bytes, the inner state, and the same in one piece.
    Memory(
      'giving its state to a newcomer',
      f'{F32_BYTES + 2 * inner:g}N',
      (F32_BYTES + 2 * inner) * n,
    ),
    Memory(
      "taking a donor's state, once",
      f'{2 * state:g}N',
      2 * state * n,
    ),
  )


def of_syncer(
  situation: Situation, protocol: ProtocolConfig, b: float
) -> tuple[Memory, ...]:
  """See `runtime/global_model.py`, `syncing.py`, `peers.py`."""
  n, p, ahead = situation.params, protocol.fragments, protocol.inflight_max
  m = situation.learners
  return (
    Memory('Θ, momentum, residual', '12N', 3 * F32_BYTES * n),
    Memory(
      f'contributions of {ahead} rounds',
      f'{ahead}·M·4N/P',
      ahead * m * F32_BYTES * n / p,
    ),
    # Δ, u, what is wanted and sent, the next Θ_p and residual.
    Memory('the outer step', '6·4N/P', 6 * F32_BYTES * n / p),
    # One of each kind per learner and fragment until it is fetched.
    Memory('updates on offer', f'{ahead}·M·bN/P', ahead * m * b * n / p),
    # Arrays of numpy are written as they are; the momentum is of jax.
    Memory('its checkpoint, while it is written', '4N', F32_BYTES * n),
  )
