# SPDX-License-Identifier: Apache-2.0
"""Runs one system's processes, and follows their steps over all rates.

The links change their rate while the processes go on: each cell is a window of
the same run, after a warm-up at its rate, from the fastest link to the slowest.
"""

import dataclasses
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

from diloco.metrics import names
from diloco.metrics.jsonl import Tail
from diloco.metrics.workdir import Workdir
from launch.netbench.links import ShapedLinks
from launch.netbench.net_systems import NetPrediction, NetSystem, Setting
from launch.session import Interrupted
from launch.supervisor import Supervisor

LOOK_S = 0.1
START_S = 180.0  # For processes to compile and to meet.
PERIODS = 2  # Of a warm-up, as time-outs get used to a rate; of a window.
PATIENCE = 4.0  # A window may take so many times what is predicted, and
GRACE_S = 60.0  # so much.
FOLDER = 'netbench-'  # Then the pid of its owner, in the folder for these.
LOG_TAIL = 1500  # Characters of a log that a failure shows.


class SystemFailed(Exception):
  """A system could not be measured; the message says why."""


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


class _Followed:
  """The steps and rounds of running processes, read from their files."""

  def __init__(self, setting: Setting, workdir: Workdir):
    self._tails = {m: Tail(workdir.metrics(m)) for m in setting.members}
    self._tape = Tail(workdir.tape)
    self.steps_s: dict[str, list[float]] = {m: [] for m in setting.members}
    self.rounds = 0

  def look(self) -> None:
    for member, tail in self._tails.items():
      self.steps_s[member] += [r[names.STEP_TIME] for r in tail.new_records()]
    self.rounds += sum(r['kind'] == 'Publish' for r in self._tape.new_records())

  def counts(self) -> dict[str, int]:
    """Returns how many steps each member has made."""
    return {member: len(found) for member, found in self.steps_s.items()}


class SystemRun:
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
    self._system = system
    self._setting = setting
    self._links = links
    self._received = received
    prefix = f'{FOLDER}{os.getpid()}-'
    self._folder = pathlib.Path(tempfile.mkdtemp(prefix=prefix))
    workdir = Workdir(self._folder / 'run')
    for path in (workdir.root, workdir.metrics('x').parent):
      path.mkdir(exist_ok=True)
    roles, environment = system.roles(setting, links, workdir, alone)
    self._log = workdir.log
    self._supervisor = Supervisor(
      roles,
      log=workdir.log,
      environment=os.environ | environment,
      restarts_max=0,
      restart_delay_s=0.0,
      announce=lambda event: None,
      hurry=lambda: bool(received),
    )
    self._seen = _Followed(setting, workdir)

  def __enter__(self) -> 'SystemRun':
    return self

  def __exit__(self, *exception) -> None:
    self._supervisor.stop()
    shutil.rmtree(self._folder, ignore_errors=True)

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
    self._links.shape(mbits)
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

  def _made(self) -> dict[str, int]:
    self._seen.look()
    return self._seen.counts()

  def _mean_s(self, before: dict[str, int], period: int) -> float:
    """Returns the mean step time since then, over whole periods."""
    each = []
    for member, n in before.items():
      found = self._seen.steps_s[member][n:]
      each.append(statistics.fmean(found[: len(found) // period * period]))
    return statistics.fmean(each)

  def _until(self, holds: Callable[[], bool], limit_s: float) -> None:
    """Polls until `holds()`; raises for a signal, a death or the limit."""
    over_s = time.monotonic() + limit_s
    while not holds():
      self._supervisor.poll()
      if self._received:
        raise Interrupted(self._received[0])
      if failure := self._supervisor.failure:
        raise SystemFailed(f'{failure}{self._tail(failure.partition(" ")[0])}')
      if time.monotonic() > over_s:
        made = ', '.join(f'{m} {n}' for m, n in self._seen.counts().items())
        raise SystemFailed(f'too slow: after {limit_s:.0f} s, steps: {made}')
      time.sleep(LOOK_S)

  def _tail(self, process: str) -> str:
    path = self._log(process)
    if not path.exists():
      return ''
    return f'; its log ends:\n{path.read_text(errors="replace")[-LOG_TAIL:]}'


def remove_left() -> None:
  """Removes the folders of commands that were killed."""
  for folder in pathlib.Path(tempfile.gettempdir()).glob(f'{FOLDER}*-*'):
    owner = folder.name.removeprefix(FOLDER).partition('-')[0]
    if owner.isdecimal() and not pathlib.Path('/proc', owner).exists():
      shutil.rmtree(folder, ignore_errors=True)
