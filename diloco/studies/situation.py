# SPDX-License-Identifier: Apache-2.0
"""The situation that a plan is made for, checked; fields are flags of
`plan`.
"""

import dataclasses
import math

from diloco.config_values import SCALES, ConfigError, Section
from diloco.sim.payload_bytes import BITS

THETA_BYTES = 4  # Of a parameter: θ is f32.


@dataclasses.dataclass(frozen=True)
class Situation(Section):
  """The given situation.

  Attributes:
    params: parameters of the model, N.
    learners: M.
    bandwidth_gbps: rate of a learner's link, each way.
    step_s: T, duration of an inner step.
    datacentres: D, with a shard of the syncer in each; 1: the syncer is one
      process elsewhere, as it is built here, and every byte uses the link.
    chips: chips of all learners; 0: nothing is said of failures.
    mtbi_days: mean time between interruptions of a chip.
    pause_s: duration of one reconfiguration of an elastic learner.
    codec: both ways.
    block_size: values that share a scale.
    scale: type of the scales.
    latency_s: one way.
    state_bytes_per_param: bytes of θ and the inner optimizer's state.
    host_speed: speed of hosts, relative to those of `host_speeds`.
  """

  params: float
  learners: int
  bandwidth_gbps: float
  step_s: float
  datacentres: int = 1
  chips: int = 0
  mtbi_days: float = 365.0
  pause_s: float = 13.7
  codec: str = 'int4'
  block_size: int = 128
  scale: str = 'bf16'
  latency_s: float = 0.05
  state_bytes_per_param: float = 12.0
  host_speed: float = 1.0

  def __post_init__(self):
    broken = [f'--{rule}' for rule in self.broken_rules()]
    if broken:
      raise ConfigError(broken)

  def broken_rules(self):
    yield from self._positive(
      'bandwidth_gbps', 'step_s', 'mtbi_days', 'host_speed'
    )
    if not 1 <= self.params < math.inf:
      yield f'params={self.params}: must be finite, at least 1, such as 12e9'
    yield from self._at_least(1, 'learners', 'datacentres')
    yield from self._at_least(0, 'chips')
    if 0 < self.chips < self.learners:
      yield f'chips={self.chips}: must be at least learners={self.learners}'
    if self.datacentres > max(1, self.learners):
      yield (
        f'datacentres={self.datacentres}: at most one for each of '
        f'learners={self.learners}'
      )
    for key in ('pause_s', 'latency_s'):
      if not 0 <= getattr(self, key) < math.inf:
        yield f'{key}={getattr(self, key)}: must be finite, at least 0'
    if not THETA_BYTES <= self.state_bytes_per_param < math.inf:
      yield (
        f'state_bytes_per_param={self.state_bytes_per_param}: must be finite, '
        f'at least {THETA_BYTES}, which θ takes; 12 with AdamW'
      )
    yield from self._one_of('codec', BITS)
    yield from self._one_of('scale', SCALES)
    if self.block_size < 1 or self.block_size % 8:
      yield f'block_size={self.block_size}: must be a positive multiple of 8'
