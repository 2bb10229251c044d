# SPDX-License-Identifier: Apache-2.0
"""When a round may merge: quorum, admission, grace window; pure decisions.

`RoundPolicy` holds what the configuration says of them. `syncer/collecting.py`
and those who pull and close ask it; the drivers, simulated or not, run these.
"""

from typing import NamedTuple

from diloco.protocol.config import ADMISSIONS, QUORUM_RULES, ProtocolConfig
from diloco.protocol.grace import grace_window_s
from diloco.protocol.quorum_rules import Standing, Verdict


class RoundPolicy(NamedTuple):
  """The rules of one run by which its rounds wait and merge."""

  config: ProtocolConfig

  def quorum(self, live: int, proven: int) -> int:
    """Returns K now: at most the learners that can be pulled from, at least 1.

    Args:
      live: number of live learners.
      proven: those of them that do not rest after failed pulls.
    """
    return max(1, min(self.config.quorum, proven or live))

  def enough(self, offers: int, live: int, quorum: int) -> Verdict:
    """Says if a round may merge so many offers.

    Args:
      offers: those that it can merge.
      live: learners that are here to stay.
      quorum: K as it is now.
    """
    rule = QUORUM_RULES[self.config.quorum_rule]
    return rule(Standing(offers, live, quorum))

  def waits_for_clock(self) -> bool:
    """Returns True if only clocks that have reached a round give it offers."""
    return ADMISSIONS[self.config.admission].waits_for_clock

  def admits(self, clock: int | None, due_step: int) -> Verdict:
    """Says if a learner's clock lets its offer into a round.

    Args:
      clock: its pace clock; None: it is leaving.
      due_step: at which the round is due; 0 in a run's finish.
    """
    if self.waits_for_clock() and clock is not None and clock < due_step:
      return Verdict(False, f'clock {clock} before step {due_step}')
    return Verdict(True, '')

  def window_s(
    self, step_s: float | None, quorum_s: float, sync_s: float
  ) -> float:
    """Returns ξ_grace in seconds; `step_s` None: no step is known yet."""
    if step_s is None:
      return 0.0
    config = self.config
    return grace_window_s(
      *(step_s, quorum_s, sync_s),
      *(config.overlap_steps, config.grace_safety, config.grace_cap_steps),
    )
