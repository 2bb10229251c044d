# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs utilisation of a learner's steps, if the peak is known."""

from diloco.config import hardware, run_config
from diloco.metrics import names
from diloco.models.flops import step_flops
from diloco.models.kinds import sizes_of


class Utilisation:
  """FLOPs of a step, divided by the chips' peak over its duration.

  See `models/flops.py` for what is counted.

  Args:
    device_kind: kind of the learner's devices, as jax names it.
  """

  def __init__(self, config: run_config.RunConfig, device_kind: str):
    chip = hardware.chip_of(device_kind)
    self._least_s = None  # Seconds of a step at the peak of all chips.
    sizes = sizes_of(config.model)
    if chip is not None and sizes is not None:
      data = config.data
      flops = step_flops(sizes, data.batch, data.seq_len)
      peak = config.mesh.devices * chip.bf16_flops
      self._least_s = flops.total / peak

  def scalars(self, step_s: float) -> dict[str, float]:
    """Returns the metric of a step; empty if peak or FLOPs are unknown."""
    if self._least_s is None:
      return {}
    return {names.MFU: self._least_s / step_s}
