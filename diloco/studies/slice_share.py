# SPDX-License-Identifier: Apache-2.0
"""Learners on TPU slices, by arithmetic: a step's time, a chip's memory.

`python -m diloco.plan --config=… --topology=…` compiles the learner instead.
"""

import dataclasses
import re
from collections.abc import Iterator

from diloco.config import hardware
from diloco.config.hardware import Topology
from diloco.config.sections import ConfigError
from diloco.models.flops import PER_PARAMETER
from diloco.sizing.host_memory import F32_BYTES, in_bytes

MFU = 0.4  # What well-tuned dense training reaches.
_ON = re.compile(r'(?:(\d+)x)?([a-z]\w*-\d+)')


def parse(text: str) -> tuple[int, Topology]:
  """Returns the learners and the slice of each of a text such as '4xv5e-256'.

  Raises:
    ConfigError: it is not of that form, or there is no such slice.
  """
  found = _ON.fullmatch(text)
  if not found or found[1] == '0':
    raise ConfigError(
      [f'--on={text}: must be learners x slice, such as 4xv5e-256']
    )
  return int(found[1] or 1), hardware.topology(found[2], '--on')


def step_s(of: Topology, params: float, tokens: float) -> float:
  """Returns the time of a step at `MFU`, by 6ND: attention is left out."""
  peak = of.chips * of.chip.bf16_flops
  return PER_PARAMETER * params * tokens / (MFU * peak)


@dataclasses.dataclass(frozen=True)
class ChipShare:
  """Bytes on each chip of a learner whose arrays are all in even shards."""

  of: Topology
  state: float  # θ and the inner state.
  gradients: float
  exchange: float  # Snapshots of rounds in flight, and what has arrived.

  @property
  def total(self) -> float:
    return self.state + self.gradients + self.exchange

  @property
  def left(self) -> float:
    """Bytes for activations, batch and code; negative if there are none."""
    return self.of.chip.hbm_bytes - self.total


def share(
  of: Topology, n: float, f: float, state_bytes: float, ahead: int
) -> ChipShare:
  """Returns the share of a chip.

  Args:
    n: parameters.
    f: those in the largest fragment.
    state_bytes: bytes of θ and the inner state of a parameter.
    ahead: rounds that may be in flight.
  """
  return ChipShare(
    of,
    state_bytes * n / of.chips,
    F32_BYTES * n / of.chips,
    2 * ahead * F32_BYTES * f / of.chips,
  )


def lines(found: ChipShare) -> Iterator[str]:
  """Yields a chip's memory as text of at most 67 columns."""
  chip = found.of.chip
  percent = 100 * found.total / chip.hbm_bytes
  verdict = 'it fits' if found.left > 0 else 'IT DOES NOT FIT'
  yield (
    f'{verdict}: {in_bytes(found.total)} are {percent:.2g} % of '
    f'{in_bytes(chip.hbm_bytes)}: θ and state {in_bytes(found.state)},'
  )
  left = in_bytes(found.left) if found.left > 0 else 'nothing'
  yield (
    f'gradients {in_bytes(found.gradients)}, exchange '
    f'{in_bytes(found.exchange)}; {left} left for activations'
  )
