# SPDX-License-Identifier: Apache-2.0
"""Traces inner steps with jax.profiler, when asked; how well they use chips."""

import pathlib

import jax
from absl import logging

from diloco.config import hardware, run_config
from diloco.metrics import names
from diloco.models.flops import step_flops
from diloco.models.kinds import sizes_of


class StepProfiler:
  """Traces some consecutive inner steps of one process, as often as asked.

  TensorBoard's profiler and Perfetto show a trace. Steps are slower while one
  is taken, and the step after it waits until it is written.

  Args:
    folder: where each trace gets a folder of its own, named by its first step.
    at_step: the step of this process, counted from 1, with which a trace
      begins; 0: none does unless asked.
    steps: inner steps in a trace.
  """

  def __init__(self, folder: pathlib.Path, at_step: int, steps: int):
    self._folder = folder
    self._own_folder = folder  # Of the newest trace.
    self._at_step = at_step
    self._steps = steps
    self._dispatched = 0
    self._traced: int | None = None  # Steps in the trace; None: there is none.
    self._asked = False

  def ask(self, *_):
    """Has the next step begin a trace, unless one is taken; signal-safe."""
    self._asked = True

  def before_step(self):
    """Begins or ends a trace; call it before each step is dispatched."""
    self._dispatched += 1
    if self._traced is None:
      if self._asked or self._dispatched == self._at_step:
        self._asked = False
        self._begin()
    else:
      self._asked = False
      if self._traced == self._steps:
        self.close()
    if self._traced is not None:
      self._traced += 1

  def close(self):
    """Writes the trace in progress, if there is one."""
    if self._traced is None:
      return
    self._traced = None
    if self._attempt(jax.profiler.stop_trace):
      logging.info('a trace is in %s', self._own_folder)

  def _begin(self):
    # JAX names it by the second, in which there may be another.
    self._own_folder = self._folder / f'step-{self._dispatched}'
    if self._attempt(lambda: jax.profiler.start_trace(self._own_folder)):
      self._traced = 0

  def _attempt(self, call) -> bool:
    """Returns True if it worked; training goes on without a trace."""
    try:
      call()
    except (RuntimeError, OSError) as error:
      logging.error('no trace in %s: %s', self._own_folder, error)
      return False
    return True


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
