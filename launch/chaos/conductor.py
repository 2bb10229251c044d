# SPDX-License-Identifier: Apache-2.0
"""Performs a plan of faults on real processes, and writes down what happened.

The folder `chaos/` of the run then holds `plan.json` (what was planned, and
how), `faults.jsonl` (what was performed, when, and what the relay counted),
and `course.json` (times of the run's phases).
"""

import contextlib
import dataclasses
import heapq
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

from diloco import faults
from diloco.config.run_config import RunConfig
from diloco.faults import KINDS, WAYS, Fault
from diloco.metrics import files
from diloco.metrics.figures import clock
from diloco.metrics.workdir import Workdir
from launch.chaos import stage as chaos_stage
from launch.chaos.live_run import LiveRun, Overdue
from launch.chaos.relay import Relay
from launch.chaos.stage import Clocks, Parts, RealStage
from launch.program import Processes
from launch.session import Interrupted

# Until every learner is merged, at first and at the end: no measure of speed,
# but what a hang would pass. On a machine of load 18, starts took 150 s.
READY_S = 600.0
CALM_S = 15.0  # Before the plan, to measure speeds and links.
QUIET_S = 5.0  # After it, in which nothing may die.
LATE_S = 20.0  # So long a fault waits for its target to run.
AGAIN_S = 0.2
TURN_S = 0.02
LATE_TURN_S = 0.1  # A turn that is later shows that the machine is busy.
NOT_THERE = 'its target did not run'


@dataclasses.dataclass(frozen=True)
class Course:
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


class Folder:
  """Files of a chaos run, in `chaos/` of its folder."""

  def __init__(self, workdir: Workdir):
    self.workdir = workdir
    self.root = workdir.chaos
    self.plan = self.root / 'plan.json'
    self.faults = self.root / 'faults.jsonl'
    self.course = self.root / 'course.json'
    self.verdict = self.root / 'verdict.json'
    self.clocks = self.root / 'clocks'

  def twin(self, number: int) -> pathlib.Path:
    """Returns the folder of a fault-free twin."""
    return self.root / f'twin-{number}'


@dataclasses.dataclass(frozen=True)
class ChaosRun:
  """One run of real processes under a plan.

  Attributes:
    config: with `log_every_steps` = 1 and a data plane that can be relayed.
    arguments: the flags that give a process this configuration.
    workdir: occupied, empty.
    learners: of what each learner consists.
    say: takes a line for the user.
    show: takes how far it is.
    received: signals that ask to stop.
    seed: of the relay's draws.
  """

  config: RunConfig
  arguments: Sequence[str]
  workdir: Workdir
  learners: Sequence[Processes]
  say: Callable[[str], None]
  show: Callable[[str], None]
  received: list[int]
  seed: int

  def perform(self, plan: Sequence[Fault], seconds: float) -> None:
    """Runs from the first process to the last; writes the folder's files.

    Raises:
      Overdue: the run did not begin to merge.
      live_run.RunFailed: the processes can't go on.
      Interrupted: by a signal.
    """
    with self._processes() as (run, relay, parts, clocks):
      stage = RealStage(run, relay, parts, clocks)
      try:
        course = self._phases(run, stage, relay, plan, seconds)
      finally:
        stage.end_all()
    run.read()
    files.write_json(Folder(self.workdir).course, dataclasses.asdict(course))

  def without_faults(
    self, holds: Callable[[], bool], deadline_s: float, what: str
  ) -> None:
    """Runs until `holds()`; raises as `perform` does."""
    with self._processes() as (run, *_):
      run.until(holds, deadline_s, what)

  @contextlib.contextmanager
  def _processes(self) -> Iterator[tuple[LiveRun, Relay, Parts, Clocks]]:
    clocks = Clocks(Folder(self.workdir).clocks)
    with Relay(chaos_stage.hosts_of(self.config), self.seed) as relay:
      parts = Parts(
        *(self.config, self.arguments, self.workdir),
        *(relay, clocks, self.learners),
      )
      with LiveRun(
        *(self.config, self.arguments, self.workdir),
        self.config.run.restart_delay_s,
        announce=lambda event: None,
        on_poll=self._look,
        parts=parts,
      ) as run:
        yield run, relay, parts, clocks

  def _look(self) -> None:
    """Ends the run for a signal, at every poll."""
    if self.received:
      raise Interrupted(self.received[0])

  def _phases(
    self,
    run: LiveRun,
    stage: RealStage,
    relay: Relay,
    plan: Sequence[Fault],
    seconds: float,
  ) -> Course:
    self.show('the processes start')
    run.until(lambda: run.all_merge(0.0), READY_S, 'every learner is merged')
    calm_s = time.time()
    self.say(f'every learner is merged; {CALM_S:.0f} s of calm, then faults')
    self.show('calm, then the plan')
    stage.measure_links(CALM_S)
    began_s = time.time()
    performance = _Performance(self, run, stage, relay)
    performance.play(plan, seconds)
    stage.end_all()
    ended_s = time.time()
    unready = ''
    self.say('the plan is over; all is healed')
    self.show(f'until all are merged again, then {QUIET_S:.0f} s of quiet')
    left = {fault.learner for fault in plan if faults.removes(fault.kind)}
    new = {fault.learner for fault in plan if faults.adds(fault.kind)}
    ids = {*run.learners, *new} - left
    try:
      run.until(
        lambda: all(run.merges(ended_s, m) for m in ids),
        READY_S,
        'every learner is merged after the plan',
      )
      run.spend(QUIET_S)
    except Overdue as error:
      unready = str(error)
    return Course(calm_s, began_s, ended_s, unready, performance.late_turns)


class _Performance:
  """The time of the plan: begins faults, ends them, writes them down."""

  def __init__(
    self, chaos: ChaosRun, run: LiveRun, stage: RealStage, relay: Relay
  ):
    self._chaos = chaos
    self._run = run
    self._stage = stage
    self._relay = relay
    self._path = Folder(chaos.workdir).faults
    self._order = itertools.count()
    self._due: list = []  # (time, order, 'begin' or 'end', fault).
    self._begun: dict[int, tuple[float, dict]] = {}  # By number.
    self.late_turns: list[tuple[float, float]] = []

  def play(self, plan: Sequence[Fault], seconds: float) -> None:
    """Performs a plan that takes so long."""
    began_s = time.monotonic()
    for fault in plan:
      self._at(fault.at_s, 'begin', fault)
    last_s = 0.0
    while (now_s := time.monotonic() - began_s) < seconds:
      if (late_s := now_s - last_s - TURN_S) > LATE_TURN_S:
        self.late_turns.append((time.time(), late_s))
      last_s = now_s
      self._chaos.show(f'the plan, {clock(seconds - now_s)} left')
      while self._due and self._due[0][0] <= now_s:
        _, _, what, fault = heapq.heappop(self._due)
        (self._begin if what == 'begin' else self._end)(fault, now_s)
      self._stage.tick()
      self._run.poll()
      time.sleep(TURN_S)
    for _, _, what, fault in sorted(self._due):
      if what == 'end':
        self._end(fault, seconds)
      else:
        self._write(fault, failed='the plan was over before')

  def _at(self, at_s: float, what: str, fault: Fault) -> None:
    heapq.heappush(self._due, (at_s, next(self._order), what, fault))

  def _begin(self, fault: Fault, now_s: float) -> None:
    if not faults.adds(fault.kind) and not self._stage.is_there(fault.target):
      if now_s < fault.at_s + LATE_S:
        self._at(now_s + AGAIN_S, 'begin', fault)
      else:
        self._chaos.say(f'{fault}: not performed, {NOT_THERE}')
        self._write(fault, failed=f'{NOT_THERE} for {LATE_S:.0f} s')
      return
    self._chaos.say(f'{now_s:6.1f} s  {fault.number}: {str(fault)[10:]}')
    counts = {}
    if KINDS[fault.kind].counters:
      counts = {w: self._relay.counts(fault.target, w) for w in WAYS}
    self._begun[fault.number] = time.time(), counts
    faults.begin(self._stage, fault)
    self._at(now_s + fault.hold_s, 'end', fault)

  def _end(self, fault: Fault, now_s: float) -> None:
    del now_s
    faults.end(self._stage, fault)
    began_s, counts = self._begun.pop(fault.number)
    counted = {
      way: self._relay.counts(fault.target, way).since(before)
      for way, before in counts.items()
    }
    self._write(
      fault, began_s=began_s, ended_s=time.time(), counted=counted, failed=''
    )

  def _write(self, fault: Fault, **found) -> None:
    with self._path.open('a') as file:
      file.write(json.dumps({**dataclasses.asdict(fault), **found}) + '\n')
