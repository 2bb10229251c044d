# SPDX-License-Identifier: Apache-2.0
"""Runs one system's processes, and follows their steps over all rates.

The links change their rate while the processes go on: each cell is a window of
the same run, after a warm-up at its rate, from the fastest link to the slowest.
"""

import dataclasses
import statistics
import time

from tests.netbench.links import ShapedLinks
from tests.netbench.net_systems import NetPrediction, NetSystem, Setting
from tests.netbench.process_run import ProcessRun

START_S = 180.0  # For processes to compile and to meet.
PERIODS = 2  # Of a warm-up, as time-outs get used to a rate; of a window.
PATIENCE = 4.0  # A window may take so many times what is predicted, and
GRACE_S = 60.0  # so much.


@dataclasses.dataclass(frozen=True)
class NetCell:
  """One system over links of one rate.

  Attributes:
    mbits: the rate of every link, each way.
    seconds: length of the window.
    step_s: mean of the steps of all members.
    alone_s: the same of members that exchange nothing.
    pace: rounds closed per round that steps made due; None: no rounds.
    sent_bytes: what a member's interface sent per step; a mean.
    busiest: what the busiest link carried in its busiest direction, as a
      share of its rate.
  """

  system: str
  mbits: float
  seconds: float
  step_s: float
  alone_s: float
  pace: float | None
  sent_bytes: float
  busiest: float
  predicted: NetPrediction

  @property
  def utilisation(self) -> float:
    """Step time without a network over that with it."""
    return self.alone_s / self.step_s


class SystemRun(ProcessRun):
  """One system's processes; a `with` block ends them.

  Args:
    alone: members exchange nothing: the reference.
    received: signals that ask to stop.
  """

  def __init__(
    self,
    system: NetSystem,
    setting: Setting,
    links: ShapedLinks,
    received: list[int],
    alone: bool = False,
  ):
    super().__init__(setting.members, received)
    self._system = system
    self._setting = setting
    self._links = links
    self._supervise(*system.roles(setting, links, self.workdir, alone))

  def start(self, steps: int) -> None:
    """Starts all processes over links without a limit, for so many steps."""
    self._links.shape(None)
    self._until(lambda: min(self._made().values()) >= steps, START_S)

  def step_s(self, seconds: float) -> float:
    """Returns the mean step time of a window."""
    before = self._made()
    self._pass(before, seconds, 1, seconds + GRACE_S)
    return self._mean_s(before, 1)

  def cell(
    self, name: str, mbits: float, seconds: float, alone_s: float
  ) -> NetCell:
    """Measures at one rate.

    Args:
      name: the system's.
      seconds: the least length of the window.
      alone_s: see `NetCell`.
    """
    predicted = self._system.predict(self._setting, mbits, alone_s)
    period = self._system.period(self._setting)
    self._links.shape(mbits, self._setting.delay_ms)
    warm_s = PERIODS * period * alone_s / predicted.utilisation
    limit_s = GRACE_S + PATIENCE * (seconds + warm_s)
    self._pass(self._made(), 0.0, period, limit_s)
    before, rounds = self._made(), self._seen.rounds
    sent, began_s = self._links.counts(), time.monotonic()
    self._pass(before, seconds, period, limit_s)
    passed_s, now = time.monotonic() - began_s, self._links.counts()
    mean_s = self._mean_s(before, period)
    closed = (self._seen.rounds - rounds) * self._spacing()
    most = max(n - before[m] for m, n in self._seen.counts().items())
    gone = {m: [b - a for a, b in zip(sent[m], now[m])] for m in now}
    carried = statistics.fmean(gone[m][0] for m in self._setting.members)
    return NetCell(
      system=name,
      mbits=mbits,
      seconds=passed_s,
      step_s=mean_s,
      alone_s=alone_s,
      pace=None if self._system.waits else closed / most,
      sent_bytes=carried / (passed_s / mean_s),
      busiest=8e-6 * max(map(max, gone.values())) / passed_s / mbits,
      predicted=predicted,
    )

  def _pass(
    self, before: dict[str, int], seconds: float, period: int, limit_s: float
  ) -> None:
    """Waits for so many seconds, and for the end of a period."""
    until_s = time.monotonic() + seconds

    def has_passed() -> bool:
      made = self._made()
      least = min(made[m] - n for m, n in before.items())
      periods, rest = divmod(least, period)
      # Near the end of one: else the counters miss a part of its traffic.
      ends = periods >= PERIODS and rest <= period // 12
      return ends and time.monotonic() >= until_s

    self._until(has_passed, limit_s)

  def _spacing(self) -> int:
    """Returns s, the steps from one round to the next."""
    return self._system.config(self._setting).protocol.spacing_steps

  def _mean_s(self, before: dict[str, int], period: int) -> float:
    """Returns the mean step time since then, over whole periods."""
    each = []
    for member, n in before.items():
      found = self._seen.steps_s[member][n:]
      each.append(statistics.fmean(found[: len(found) // period * period]))
    return statistics.fmean(each)
