# SPDX-License-Identifier: Apache-2.0
"""Durations in a simulated cluster, and links that are cut."""

import dataclasses
from collections.abc import Mapping

from diloco.simulator.network import USUAL, LinkDeviation

Ways = tuple[str, ...]  # 'up' and 'down': to the syncer, and from it.
BOTH_WAYS = ('up', 'down')


@dataclasses.dataclass(frozen=True)
class Timing:
  """Durations, in seconds.

  Attributes:
    step_s: an inner step, by learner id.
    jitter: standard deviation of a step's length, as a share of it.
    latency_s: a message, one way.
    transfer_s: a fragment's bytes.
    encode_s: a snapshot, from boundary to offer.
    merge_s: the outer step.
    reconnect_s: from a lost stream to the next attempt.
    slow_share: share of the steps that take three times as long.
    links: links that differ from the usual one, by learner id.
    late_share: share of the syncer's pulls that take `late_s` more, and
      succeed.
    late_s: see `late_share`.
  """

  step_s: dict[int, float]
  jitter: float = 0.0
  latency_s: float = 0.001
  transfer_s: float = 0.002
  encode_s: float = 0.002
  merge_s: float = 0.002
  reconnect_s: float = 0.2
  slow_share: float = 0.0
  late_share: float = 0.0
  late_s: float = 0.0
  links: Mapping[int, LinkDeviation] = dataclasses.field(default_factory=dict)

  def up_s(self, learner: int) -> float:
    """Returns the latency of a message to the syncer."""
    return self.latency_s + self.links.get(learner, USUAL).up_s

  def down_s(self, learner: int) -> float:
    """Returns the latency of a message from the syncer."""
    return self.latency_s + self.links.get(learner, USUAL).down_s

  @property
  def pull_s(self) -> float:
    """Time from the syncer's request for bytes to their arrival."""
    return self.latency_s + self.transfer_s
