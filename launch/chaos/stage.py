# SPDX-License-Identifier: Apache-2.0
"""Real processes that can be hit: signals, the relay, limits, clocks."""

import contextlib
import dataclasses
import os
import pathlib
import resource
import signal
import struct
import sys
import time
from collections.abc import Sequence

from diloco import faults
from diloco.config.run_config import RunConfig
from diloco.faults import WAYS, Impairment
from diloco.metrics.workdir import Workdir, learner_name
from launch.chaos.clock import sitecustomize
from launch.chaos.live_run import LiveRun
from launch.chaos.relay import SOUND, Relay
from launch.program import Processes, Program, Role, program

LEARNER_HOST = '127.0.1.{}'  # Of a learner, by its id plus 1.
LEARNERS_MAX = 200
REASON = 'by the plan of the chaos run'
STOPPED_S = 0.12  # A slow learner stands so long,
STEPS_STOPPED = 2.0  # and at least as long as so many of its steps.
THROTTLED_BYTES_PER_S_MIN = 2000.0


def hosts_of(config: RunConfig) -> dict[str, str]:
  """Returns the address on which each learner that may ever be listens."""
  ids = min(LEARNERS_MAX, config.data.shards)
  return {learner_name(m): LEARNER_HOST.format(m + 1) for m in range(ids)}


class Clocks:
  """Files that tell processes how wrong their clocks are."""

  def __init__(self, folder: pathlib.Path):
    self._folder = folder
    folder.mkdir(parents=True, exist_ok=True)

  def environment(self, name: str) -> tuple[tuple[str, str], ...]:
    """Returns what process `name` needs; its clock is right at first."""
    self.set(name, 0.0)
    shim = pathlib.Path(sitecustomize.__file__).parent.absolute()
    path = os.environ.get('PYTHONPATH', '')
    return (
      ('PYTHONPATH', os.pathsep.join([str(shim), *([path] if path else [])])),
      (sitecustomize.VARIABLE, str(self._file(name).absolute())),
    )

  def set(self, name: str, wrong_s: float) -> None:
    """Sets a clock; the process need not be there."""
    with self._file(name).open(
      'r+b' if self._file(name).exists() else 'wb'
    ) as f:
      f.write(struct.pack('=d', wrong_s))

  def _file(self, name: str) -> pathlib.Path:
    return self._folder / f'{name}.clock'


class Parts:
  """The roles of a run whose learners connect through a relay.

  Args:
    arguments: the flags that give a process this configuration.
    learners: of what each learner consists.
  """

  def __init__(
    self,
    config: RunConfig,
    arguments: Sequence[str],
    workdir: Workdir,
    relay: Relay,
    clocks: Clocks,
    learners: Sequence[Processes],
  ):
    self._config = config
    self._arguments = arguments
    self._workdir = workdir
    self._relay = relay
    self._clocks = clocks
    self._learners = learners
    self._made: Program | None = None

  def __call__(self, address: str) -> Program:
    """Returns the program of a run whose syncer listens at `address`."""
    self._made = program(
      self._config,
      self._arguments,
      self._workdir,
      address,
      learners=self._learners,
    )
    roles = tuple(map(self.connected, self._made.roles))
    return dataclasses.replace(self._made, roles=roles)

  def newcomer(self, learner: int) -> Role:
    """Returns a learner of a new id, with the devices of a single host."""
    single = (each for each in self._learners if each.hosts == 1)
    like = next(single, self._learners[-1])
    role = dataclasses.replace(
      self._made.newcomer(learner),
      optional=False,
      hosts=like.hosts,
      environment=like.environment,
    )
    return self.connected(role)

  def connected(self, role: Role) -> Role:
    """Returns the role with its address, its proxy and its clock."""
    host = hosts_of(self._config).get(role.name)
    serves = role.name == 'syncer' or role.name.startswith('shard-')
    if host is None and not serves:
      return role  # The evaluator, which connects to no process.
    more = [f'--proxy={self._relay.listen(role.name)}']
    environment = role.environment
    if host is not None:
      more += [
        f'--config.transport.host={host}',
        f'--notice_s={faults.NOTICE_S:g}',
      ]
      environment += self._clocks.environment(role.name)
    return dataclasses.replace(
      role, argv=(*role.argv, *more), environment=environment
    )


class RealStage:
  """A `faults.FaultStage` of real processes."""

  NAME = 'real processes'

  def __init__(self, run: LiveRun, relay: Relay, parts: Parts, clocks: Clocks):
    self._run = run
    self._relay = relay
    self._parts = parts
    self._clocks = clocks
    self._slow: dict[str, float] = {}  # When each is stopped, or goes on.
    self._stopped: set[str] = set()  # Of the slow ones, now.
    self._full: dict[str, int] = {}  # Pid whose files can't grow.
    self._paused: set[str] = set()
    self._usual_bytes_per_s: dict[str, float] = {}

  def is_there(self, target: str) -> bool:
    """Returns True if the process runs."""
    role = target.partition('.')[0]
    known = {state.name for state in self._run.supervisor.states()}
    return role in known and self._run.supervisor.is_running(role)

  def measure_links(self, seconds: float) -> None:
    """Lets some time pass, and takes what the links carry then as usual."""
    names = [learner_name(m) for m in self._run.learners]
    before = [self._carried_bytes(name) for name in names]
    self._run.spend(seconds)
    for name, earlier in zip(names, before, strict=True):
      more = self._carried_bytes(name) - earlier
      self._usual_bytes_per_s[name] = more / seconds

  def _carried_bytes(self, name: str) -> int:
    return max(self._relay.counts(name, w).carried_bytes for w in WAYS)

  def tick(self) -> None:
    """Stops slow learners half of the time; call it often."""
    now_s = time.monotonic()
    for name, at_s in self._slow.items():
      if now_s < at_s:
        continue
      stops = name not in self._stopped
      self._send(name, signal.SIGSTOP if stops else signal.SIGCONT)
      (self._stopped.add if stops else self._stopped.discard)(name)
      part_s = max(STOPPED_S, STEPS_STOPPED * self._step_s(name))
      share = faults.SLOWER - 1 if stops else 1.0
      self._slow[name] = now_s + part_s * share

  def end_all(self) -> None:
    """Ends whatever lasts, so that every process can be stopped."""
    for name in list(self._slow):
      self.slow(name, False)
    for name in list(self._paused):
      self.go_on(name)
    for name in list(self._full):
      self.fill_disk(name, False)

  # The verbs -----------------------------------------------------------------

  def kill(self, target: str) -> None:
    """SIGKILL."""
    if '.' in target:
      self._run.kill_host(target, REASON)
    else:
      self._run.supervisor.kill(target, REASON)

  def pause(self, target: str) -> None:
    """SIGSTOP."""
    self._paused.add(target)
    self._run.supervisor.pause(target, REASON)

  def go_on(self, target: str) -> None:
    """SIGCONT."""
    self._paused.discard(target)
    if self.is_there(target):
      self._run.supervisor.go_on(target, REASON)

  def preempt(self, target: str, notice_s: float) -> None:
    """SIGTERM; every learner was started with this notice."""
    assert notice_s == faults.NOTICE_S, notice_s
    self._run.supervisor.terminate(target, f'SIGTERM {REASON}')

  def dismiss(self, target: str, notice_s: float) -> None:
    """SIGTERM, for good."""
    assert notice_s == faults.NOTICE_S, notice_s
    self._run.supervisor.dismiss(target, f'SIGTERM {REASON}')

  def join(self, target: str) -> None:
    """Starts a learner of a new id."""
    learner = faults.number_of(target)
    self._run.add_learner(learner, self._parts.newcomer(learner))

  def slow(self, target: str, is_slow: bool) -> None:
    """Stops it half of the time, or no longer."""
    if is_slow:
      self._slow[target] = 0.0
      return
    del self._slow[target]
    self._stopped.discard(target)
    self._send(target, signal.SIGCONT)

  def cut(self, target: str, ways: tuple[str, ...]) -> None:
    """Changes the relay on these ways."""
    for way in ways:
      self._relay.impair(target, way, faults.CUT)

  def impair(self, target: str, impairment: Impairment) -> None:
    """Changes the relay, both ways."""
    for way in WAYS:
      self._relay.impair(target, way, impairment)

  def mend(self, target: str) -> None:
    """Heals both ways."""
    self.impair(target, SOUND)

  def throttle(self, target: str) -> None:
    """Changes the relay, by what it has measured."""
    usual = self._usual_bytes_per_s.get(target)
    if usual is None:  # It joined later: as the others.
      usual = min(self._usual_bytes_per_s.values())
    rate = max(THROTTLED_BYTES_PER_S_MIN, faults.THROTTLED_SHARE * usual)
    self.impair(target, Impairment(bytes_per_s=rate))

  def fill_disk(self, target: str, is_full: bool) -> None:
    """Limits the size of a process's files, as of a full disk."""
    if is_full:
      state = self._state(target)
      self._full[target] = state.pid
      _limit(state.pid, 0)
      return
    pid = self._full.pop(target)
    if self._state(target).pid == pid:
      _limit(pid, resource.RLIM_INFINITY)

  def set_clock(self, target: str, jump_s: float) -> None:
    """Sets the process's clock, and kills it: it reads its number once."""
    self._clocks.set(target, jump_s)
    self.kill(target)

  def _state(self, target: str):
    states = self._run.supervisor.states()
    return next(state for state in states if state.name == target)

  def _send(self, name: str, number: signal.Signals) -> None:
    # Unannounced: it happens several times a second.
    if self.is_there(name):
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self._state(name).pid, number)

  def _step_s(self, name: str) -> float:
    steps = self._run.steps[int(name.rpartition('-')[2])][-20:]
    return min((step.step_s for step in steps), default=0.0)


def _limit(pid: int, nbytes: int) -> None:
  hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
  resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, hard))


def why_not_here() -> str | None:
  """Returns why this machine can't run it; None: it can."""
  if sys.platform != 'linux':
    return 'needs Linux: one address of 127.0.0.0/8 for each learner'
  return None
