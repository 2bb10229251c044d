# SPDX-License-Identifier: Apache-2.0
"""The memory of one chip: of compiled programs, and of what lies between them.

Everything is of the largest shard, so of the chip that holds most.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

import jax
import numpy as np

from diloco.learner.device import Device

EXCHANGING = ('snapshot', 'blend', 'overwrite')  # Names of programs.
_SHAPE = re.compile(r'\b(pred|[bsuf]\w*\d+\w*)\[([\d,]*)\]')
_BITS = re.compile(r'\d+')


@dataclasses.dataclass(frozen=True)
class ChipMemory:
  """Bytes on one chip."""

  parameters: int  # θ.
  inner_state: int  # The inner optimizer's.
  batch: int  # Of one step.
  temporaries: int  # Of the inner step: gradients, activations, copies.
  code: int  # Of the inner step.
  # Of the rounds in flight, on their way to the host or, with the blend
  # 'carry', until their update has come.
  snapshots: int
  arrived: int  # Fragments of Θ that wait for their boundary, at most as many.
  exchange_temporaries: int  # Of the largest snapshot or blend, while it runs.
  donation: int  # A copy of the inner state, while a newcomer is given it.
  largest_shard: int  # Of a parameter.
  # Largest array in any snapshot or blend, to compare with that.
  largest_exchanged: int

  @property
  def exchange(self) -> int:
    """Bytes that the exchange adds to training."""
    return self.snapshots + self.arrived + self.exchange_temporaries

  @property
  def checkpoint(self) -> int:
    """Bytes of what is saved, while it is copied to the host."""
    return self.parameters + self.inner_state

  @property
  def total(self) -> int:
    """Bytes of a step with the exchange in progress, without a donation."""
    held = self.parameters + self.inner_state + self.batch + self.code
    return held + self.temporaries + self.exchange


def chip_memory(device: Device, ahead: int) -> ChipMemory:
  """Returns the chip memory of a learner whose programs are compiled.

  Args:
    device: for chips, or for their description.
    ahead: rounds that may be in flight.
  """
  step = device.programs['step'].memory_analysis()
  parameters = shard_bytes(device.params_like)
  inner_state = shard_bytes(device.state_like)
  given = step.argument_size_in_bytes - parameters - inner_state
  # Donated buffers are returned in place; anything else is new.
  fresh = step.output_size_in_bytes - step.alias_size_in_bytes
  return ChipMemory(
    parameters=parameters,
    inner_state=inner_state,
    batch=max(0, given),
    temporaries=step.temp_size_in_bytes + fresh,
    code=step.generated_code_size_in_bytes,
    donation=inner_state,
    largest_shard=largest_shard(device.params_like),
    **exchange_memory(device.programs, ahead),
  )


def exchange_memory(
  programs: Mapping[str, jax.stages.Compiled], ahead: int
) -> dict[str, int]:
  """Returns the fields of `ChipMemory` that belong to the exchange."""
  exchanging = {
    name: program
    for name, program in programs.items()
    if name.partition(' ')[0] in EXCHANGING
  }
  analyses = {
    name: program.memory_analysis() for name, program in exchanging.items()
  }
  fragment = max(
    analysis.output_size_in_bytes
    for name, analysis in analyses.items()
    if name.startswith('snapshot')
  )
  return {
    'snapshots': ahead * fragment,
    'arrived': ahead * fragment,
    'exchange_temporaries': max(
      analysis.temp_size_in_bytes for analysis in analyses.values()
    ),
    'largest_exchanged': max(map(largest_array, exchanging.values())),
  }


def shard_bytes(like) -> int:
  """Returns the bytes of one device's shards of a pytree of abstract arrays."""
  return sum(_shard(leaf) for leaf in jax.tree.leaves(like))


def largest_shard(like) -> int:
  """Bytes of the largest of them."""
  return max(_shard(leaf) for leaf in jax.tree.leaves(like))


def largest_array(program: jax.stages.Compiled) -> int:
  """Bytes of the largest array that a program has on one device, anywhere.

  Of the text of what was compiled for one device of many: arguments, results,
  and all between them, whether or not they ever have memory of their own.
  """
  return max(
    math.ceil(_element_bits(kind) * math.prod(_sizes(shape)) / 8)
    for kind, shape in _SHAPE.findall(program.as_text())
  )


def _shard(leaf) -> int:
  shape = leaf.sharding.shard_shape(leaf.shape)
  return math.prod(shape) * np.dtype(leaf.dtype).itemsize


def _element_bits(kind: str) -> int:
  return 8 if kind == 'pred' else int(_BITS.search(kind)[0])


def _sizes(shape: str) -> list[int]:
  return [int(size) for size in shape.split(',') if size]
