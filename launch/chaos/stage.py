# SPDX-License-Identifier: Apache-2.0
"""Real processes under a plan of faults: followed from outside, and hit.

They are started by their command lines; what they did is read from their files
and from the times at which they started and ended. The folder `chaos/` of the
run then holds `plan.json` (what was planned, and how), `faults.jsonl` (what was
performed, when, and what the relay counted), and `course.json` (times of the
run's phases).
"""

import contextlib
import dataclasses
import heapq
import itertools
import json
import os
import pathlib
import resource
import signal
import struct
import time
from collections.abc import Callable, Mapping, Sequence

from diloco import faults
from diloco.config.run_config import RunConfig
from diloco.faults import SOUND, WAYS, Fault, Impairment
from diloco.metrics import files, names
from diloco.metrics.figures import clock
from diloco.metrics.jsonl import Tail
from diloco.metrics.workdir import Workdir, learner_name
from launch.chaos.clock import sitecustomize
from launch.chaos.relay import Relay
from launch.local import RunFailed
from launch.preflight import free_address
from launch.program import (
  KINDS,
  LEARNER,
  Processes,
  Role,
  local_environment,
  program,
)
from launch.supervisor import ProcessEvent, Supervisor

# They would lead a process past the proxy that it was given.
PASS_BY = ('no_proxy', 'NO_PROXY', 'no_grpc_proxy')
POLL_S = 0.02
RESTARTS_MAX = 1_000_000  # Here deaths are the point.
LEARNER_HOST = '127.0.1.{}'  # Of a learner, by its id plus 1.
LEARNERS_MAX = 200
REASON = 'by the plan of the chaos run'
STOPPED_S = 0.12  # A slow learner stands so long,
STEPS_STOPPED = 2.0  # and at least as long as so many of its steps.
THROTTLED_BYTES_PER_S_MIN = 2000.0
# Until every learner is merged, at first and at the end: no measure of speed,
# but what a hang would pass. On a machine of load 18, starts took 150 s.
READY_S = 600.0
CALM_S = 15.0  # Before the plan, to measure speeds and links.
QUIET_S = 5.0  # After it, in which nothing may die.
LATE_S = 20.0  # So long a fault waits for its target to run.
AGAIN_S = 0.2
TURN_S = 0.02
LATE_TURN_S = 0.1  # A turn that is later shows that the machine is busy.
PLAN, FAULTS, COURSE = 'plan.json', 'faults.jsonl', 'course.json'


class Overdue(Exception):
  """An awaited event did not come in time."""


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenStep:
  """One inner step, as a learner recorded it."""

  time_s: float  # When it was written; seconds since the epoch.
  incarnation: int
  step: int  # 1 after the first of a process.
  step_s: float

  @classmethod
  def read(cls, record: Mapping) -> 'WrittenStep':
    """Returns a line of a learner's metrics as a step."""
    return cls(
      time_s=record[names.TIME],
      incarnation=int(record[names.INCARNATION]),
      step=record['step'],
      step_s=record[names.STEP_TIME],
    )


def participants(publish: Mapping) -> set[int]:
  """Returns the learners that a closed round of the event log has merged."""
  return {share['learner'] for share in publish['shares']}


class LiveRun:
  """Processes of one run; leaving the `with` block stops them all.

  Attributes:
    supervisor: of the processes; kills and pauses go through it.
    event log: the syncer's decisions so far.
    steps: learner id -> its steps so far, over all its processes.
    events: what happened to processes so far.

  Args:
    config: with `log_every_steps` = 1, or `steps` has gaps.
    arguments: the flags that give a process this configuration.
    workdir: occupied, empty.
    announce: is told every event.
    on_poll: called whenever the processes have been looked at.
    learners: of what each consists; none: of one process.
    connected: changes each role before it is started.
  """

  def __init__(
    self,
    config: RunConfig,
    arguments: Sequence[str],
    workdir: Workdir,
    announce: Callable[[ProcessEvent], None] = lambda event: None,
    on_poll: Callable[[], None] = lambda: None,
    learners: Sequence[Processes] = (),
    connected: Callable[[Role], Role] = lambda role: role,
  ):
    self.workdir = workdir
    self.learners = range(config.protocol.learners)
    self.tape: list[dict] = []
    self.steps: dict[int, list[WrittenStep]] = {m: [] for m in self.learners}
    self.events: list[ProcessEvent] = []
    self._announce = announce
    self._on_poll = on_poll
    self._of_each = learners
    self._connected = connected
    self._tape_tail = Tail(workdir.tape)
    self._step_tails = {
      m: Tail(workdir.metrics(learner_name(m))) for m in self.learners
    }
    address = free_address(config.transport.host, config.transport.port)
    self._program = program(
      config, arguments, workdir, address, learners=learners
    )
    files.write_json(workdir.config, dataclasses.asdict(config))
    inherited = {k: v for k, v in os.environ.items() if k not in PASS_BY}
    self.supervisor = Supervisor(
      tuple(map(connected, self._program.roles)),
      log=workdir.log,
      environment=local_environment(self._program, inherited),
      restarts_max=RESTARTS_MAX,
      restart_delay_s=config.run.restart_delay_s,
      announce=self._on_event,
    )

  def __enter__(self) -> 'LiveRun':
    return self

  def __exit__(self, *exception) -> None:
    self.supervisor.stop()

  def poll(self) -> None:
    """Restarts what is due and reads what is new.

    Raises:
      RunFailed: the supervisor has given up.
    """
    self.supervisor.poll()
    if self.supervisor.failure:
      raise RunFailed(self.supervisor.failure)
    self.read()
    self._on_poll()

  def read(self) -> None:
    """Reads what the processes have written since the last time."""
    self.tape += self._tape_tail.new_records()
    for m, tail in self._step_tails.items():
      self.steps[m] += map(WrittenStep.read, tail.new_records())

  def newcomer(self, learner: int) -> Role:
    """Returns a learner of a new id, with the devices of a single host."""
    role = dataclasses.replace(self._program.newcomer(learner), optional=False)
    if self._of_each:
      single = (spec for spec in self._of_each if spec.hosts == 1)
      like = next(single, self._of_each[-1])
      role = dataclasses.replace(
        role, hosts=like.hosts, environment=like.environment
      )
    return self._connected(role)

  def join(self, learner: int) -> None:
    """Starts a learner beyond M at the next `poll`, and reads its steps."""
    self.steps[learner] = []
    self._step_tails[learner] = Tail(
      self.workdir.metrics(learner_name(learner))
    )
    self.supervisor.add(self.newcomer(learner))

  def kill_host(self, process: str, reason: str) -> None:
    """SIGKILL for one process of a role, which is running."""
    pid = next(
      event.pid
      for event in reversed(self.events)
      if event.process == process and event.event == 'started'
    )
    # It is a child that is reaped by `poll` only: no other can have its pid.
    self._on_event(ProcessEvent(time.time(), process, 'killed', pid, reason))
    os.kill(pid, signal.SIGKILL)

  def kill_slice(self, learner: str, host: int, reason: str) -> None:
    """SIGKILL for all hosts of a slice, or of the first one that takes part.

    Args:
      host: the slice's first.
    """
    of_it = self._of_each[faults.number_of(learner)]
    part = of_it.hosts // of_it.slices
    live = self.supervisor.slices(learner)
    i = host // part if host // part in live else live[0]
    for each in range(i * part, (i + 1) * part):
      self.kill_host(f'{learner}.{each}' if each else learner, reason)

  def until(
    self, holds: Callable[[], bool], deadline_s: float, what: str
  ) -> None:
    """Polls until `holds()`; raises `Overdue` where it never does."""
    give_up_at_s = time.monotonic() + deadline_s
    while True:
      self.poll()
      if holds():
        return
      if time.monotonic() >= give_up_at_s:
        raise Overdue(f'not within {deadline_s:.0f} s: {what}')
      time.sleep(POLL_S)  # Between two polls, at which the supervisor acts.

  def spend(self, seconds: float) -> None:
    """Lets time pass, polling."""
    over_at_s = time.monotonic() + seconds
    while (left_s := over_at_s - time.monotonic()) > 0:
      self.poll()
      time.sleep(min(POLL_S, left_s))

  def merges(self, since_s: float, learner: int) -> bool:
    """Returns True if a round has merged a learner since then."""
    for line in reversed(self.tape):  # Asked for often, and for the end.
      if line['time_s'] < since_s:
        return False
      if line['kind'] == 'Publish' and learner in participants(line):
        return True
    return False

  def all_merge(self, since_s: float) -> bool:
    """Returns True if every learner was merged since then and its start."""
    last = {event.process: event for event in self.events}
    for m in self.learners:
      event = last.get(learner_name(m))
      if event is None or event.event in ('killed', 'exited'):
        return False
      started_s = event.time_s if event.event == 'started' else since_s
      if not self.merges(max(since_s, started_s), m):
        return False
    return True

  def _on_event(self, event: ProcessEvent) -> None:
    self.events.append(event)
    with self.workdir.events.open('a') as file:
      file.write(json.dumps(dataclasses.asdict(event)) + '\n')
    self._announce(event)


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
    path = self._file(name)
    # Its process has mapped the file: it stays the same one.
    with path.open('r+b' if path.exists() else 'wb') as file:
      file.write(struct.pack('=d', wrong_s))

  def _file(self, name: str) -> pathlib.Path:
    return self._folder / f'{name}.clock'


def hosts_of(config: RunConfig) -> dict[str, str]:
  """Returns the address on which each learner that may ever be listens."""
  ids = min(LEARNERS_MAX, config.data.shards)
  return {learner_name(m): LEARNER_HOST.format(m + 1) for m in range(ids)}


def connected(
  role: Role, config: RunConfig, relay: Relay, clocks: Clocks, proxied: bool
):
  """Returns a role with its address, its clock and, if asked, its proxy."""
  if not KINDS[role.name.partition('-')[0]].peer:
    return role  # The evaluator, which connects to no process.
  more, environment = [], role.environment
  if proxied:
    more.append(f'--proxy={relay.listen(role.name)}')
  if role.name.startswith(LEARNER):
    host = hosts_of(config)[role.name]
    more += [
      f'--config.transport.host={host}',
      f'--notice_s={faults.NOTICE_S:g}',
    ]
    environment += clocks.environment(role.name)
  return dataclasses.replace(
    role, argv=(*role.argv, *more), environment=environment
  )


class RealStage:
  """A `faults.FaultStage` of real processes."""

  NAME = 'real processes'

  def __init__(self, run: LiveRun, relay: Relay, clocks: Clocks):
    self._run = run
    self._relay = relay
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

  def kill_slice(self, target: str) -> None:
    """SIGKILL for its hosts; for those of another slice, if it is away."""
    name, _, host = target.partition('.')
    self._run.kill_slice(name, int(host), REASON)

  def lose_slice(self, target: str) -> None:
    """The same; the supervisor takes it back when it is told to."""
    self._run.supervisor.keep_away(target.partition('.')[0])
    self.kill_slice(target)

  def return_slice(self, target: str) -> None:
    """Has the supervisor take back what is away."""
    self._run.supervisor.take_back(target.partition('.')[0])

  def pause(self, target: str) -> None:
    """SIGSTOP."""
    self._paused.add(target)
    self._run.supervisor.send(target, signal.SIGSTOP, 'paused', REASON)

  def go_on(self, target: str) -> None:
    """SIGCONT."""
    self._paused.discard(target)
    if self.is_there(target):
      self._run.supervisor.send(target, signal.SIGCONT, 'went on', REASON)

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
    self._run.join(faults.number_of(target))

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
      self._full[target] = self._pid(target)
      _limit(self._pid(target), 0)
      return
    pid = self._full.pop(target)
    if self._pid(target) == pid:
      _limit(pid, resource.RLIM_INFINITY)

  def set_clock(self, target: str, jump_s: float) -> None:
    """Sets the process's clock, and kills it: it reads its number once."""
    self._clocks.set(target, jump_s)
    self.kill(target)

  def _carried_bytes(self, name: str) -> int:
    return max(self._relay.counts(name, w).carried_bytes for w in WAYS)

  def _pid(self, target: str) -> int | None:
    states = self._run.supervisor.states()
    return next(state.pid for state in states if state.name == target)

  def _send(self, name: str, number: signal.Signals) -> None:
    # Unannounced: it happens several times a second.
    if self.is_there(name):
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self._pid(name), number)

  def _step_s(self, name: str) -> float:
    steps = self._run.steps[faults.number_of(name)][-20:]
    return min((step.step_s for step in steps), default=0.0)


def _limit(pid: int, nbytes: int) -> None:
  hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
  resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, hard))


# Performs a plan, and writes down what happened.


@dataclasses.dataclass(frozen=True)
class RunPhases:
  """The phases of a run, by their begin in seconds since the epoch.

  Attributes:
    calm_s: every learner had been merged.
    began_s: the plan began.
    ended_s: its last second was over.
    unready: why the run was not whole again at the end; '': it was.
    late_turns: when this command itself was late, and by how much: what it has
      to do in a turn is little, so the machine was busy, or stood still.
  """

  calm_s: float
  began_s: float
  ended_s: float
  unready: str = ''
  late_turns: Sequence[tuple[float, float]] = ()


class Performance:
  """The time of a run: begins faults, ends them, writes them down.

  Args:
    say: takes a line for the user.
    show: takes how far it is.
  """

  def __init__(self, run: LiveRun, stage: RealStage, relay: Relay, say, show):
    self._run = run
    self._stage = stage
    self._relay = relay
    self._say = say
    self._show = show
    self._order = itertools.count()
    self._due: list = []  # (time, order, 'begin' or 'end', fault).
    self._begun: dict[int, tuple[float, dict]] = {}  # By number.
    self._late_turns: list[tuple[float, float]] = []

  def perform(self, plan: Sequence[Fault], seconds: float) -> None:
    """Takes a run from its start to the quiet after the plan.

    Raises:
      Overdue: the run did not begin to merge.
      RunFailed: the processes can't go on.
    """
    try:
      course = self._phases(plan, seconds)
    finally:
      self._stage.end_all()
    files.write_json(self._run.workdir.chaos / COURSE, course)

  def _phases(self, plan: Sequence[Fault], seconds: float) -> RunPhases:
    run, unready = self._run, ''
    self._show('the processes start')
    run.until(lambda: run.all_merge(0.0), READY_S, 'every learner is merged')
    calm_s = time.time()
    self._say(f'every learner is merged; {CALM_S:.0f} s of calm, then faults')
    self._stage.measure_links(CALM_S)
    began_s = time.time()
    self._play(plan, seconds)
    self._stage.end_all()
    ended_s = time.time()
    self._say('the plan is over; all is healed')
    self._show(f'until all are merged again, then {QUIET_S:.0f} s of quiet')
    left = {fault.learner for fault in plan if faults.removes(fault.kind)}
    ids = run.steps.keys() - left
    try:
      run.until(
        lambda: all(run.merges(ended_s, m) for m in ids),
        READY_S,
        'every learner is merged after the plan',
      )
      run.spend(QUIET_S)
    except Overdue as error:
      unready = str(error)
    return RunPhases(calm_s, began_s, ended_s, unready, self._late_turns)

  def _play(self, plan: Sequence[Fault], seconds: float) -> None:
    """Performs a plan that takes so long."""
    began_s = time.monotonic()
    for fault in plan:
      self._at(fault.at_s, 'begin', fault)
    last_s = 0.0
    while (now_s := time.monotonic() - began_s) < seconds:
      if (late_s := now_s - last_s - TURN_S) > LATE_TURN_S:
        self._late_turns.append((time.time(), late_s))
      last_s = now_s
      self._show(f'the plan, {clock(seconds - now_s)} left')
      while self._due and self._due[0][0] <= now_s:
        _, _, what, fault = heapq.heappop(self._due)
        if what == 'begin':
          self._begin(fault, now_s)
        else:
          self._end(fault)
      self._stage.tick()
      self._run.poll()
      time.sleep(TURN_S)
    for _, _, what, fault in sorted(self._due):
      if what == 'end':
        self._end(fault)
      else:
        self._write(fault, failed='the plan was over before')

  def _at(self, at_s: float, what: str, fault: Fault) -> None:
    heapq.heappush(self._due, (at_s, next(self._order), what, fault))

  def _begin(self, fault: Fault, now_s: float) -> None:
    if not faults.adds(fault.kind) and not self._stage.is_there(fault.target):
      if now_s < fault.at_s + LATE_S:
        self._at(now_s + AGAIN_S, 'begin', fault)
        return
      failed = f'its target did not run for {LATE_S:.0f} s'
      self._say(f'{fault}: not performed, {failed}')
      self._write(fault, failed=failed)
      return
    self._say(f'{now_s:6.1f} s  {fault.number}: {str(fault)[10:]}')
    counts = {}
    if faults.KINDS[fault.kind].counters:
      counts = {w: self._relay.counts(fault.target, w) for w in WAYS}
    self._begun[fault.number] = time.time(), counts
    faults.begin(self._stage, fault)
    self._at(now_s + fault.hold_s, 'end', fault)

  def _end(self, fault: Fault) -> None:
    faults.end(self._stage, fault)
    began_s, counts = self._begun.pop(fault.number)
    counted = {
      way: self._relay.counts(fault.target, way).since(before)
      for way, before in counts.items()
    }
    self._write(
      fault, began_s=began_s, ended_s=time.time(), counted=counted, failed=''
    )

  def _write(self, fault: Fault, **facts) -> None:
    with (self._run.workdir.chaos / FAULTS).open('a') as file:
      file.write(json.dumps({**dataclasses.asdict(fault), **facts}) + '\n')
