# SPDX-License-Identifier: Apache-2.0
"""Performs a plan of faults on real processes, and writes down what happened.

The folder `chaos/` of the run then holds `plan.json` (what was planned, and
how), `faults.jsonl` (what was performed, when, and what the relay counted),
and `course.json` (times of the run's phases).
"""

import dataclasses
import heapq
import itertools
import json
import time
from collections.abc import Callable, Sequence

from diloco import faults
from diloco.config.run_config import RunConfig
from diloco.faults import KINDS, WAYS, Fault
from diloco.metrics import files
from diloco.metrics.figures import clock
from diloco.metrics.workdir import Workdir
from launch.chaos import stage as chaos_stage
from launch.chaos.relay import Relay
from launch.chaos.stage import Clocks, LiveRun, Overdue, RealStage
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
PLAN, FAULTS, COURSE = 'plan.json', 'faults.jsonl', 'course.json'


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


def perform(
  config: RunConfig,
  arguments: Sequence[str],
  workdir: Workdir,
  learners: Sequence[Processes],
  plan: Sequence[Fault],
  seconds: float,
  seed: int,
  say: Callable[[str], None],
  show: Callable[[str], None],
  received: Sequence[int],
) -> None:
  """Runs from the first process to the last; writes the folder's files.

  Args:
    config: with `log_every_steps` = 1 and a data plane that can be relayed.
    arguments: the flags that give a process this configuration.
    workdir: occupied, empty.
    learners: of what each learner consists.
    seconds: length of the plan.
    seed: of the relay's draws.
    say: takes a line for the user.
    show: takes how far it is.
    received: signals that ask to stop.

  Raises:
    Overdue: the run did not begin to merge.
    RunFailed: the processes can't go on.
    Interrupted: by a signal.
  """

  def look() -> None:
    if received:
      raise Interrupted(received[0])

  clocks = Clocks(workdir.chaos / 'clocks')
  with (
    Relay(chaos_stage.hosts_of(config), seed) as relay,
    LiveRun(
      *(config, arguments, workdir),
      on_poll=look,
      learners=learners,
      connected=lambda role: chaos_stage.connected(role, config, relay, clocks),
    ) as run,
  ):
    stage = RealStage(run, relay, clocks)
    performance = _Performance(run, stage, relay, say, show)
    try:
      course = performance.phases(plan, seconds)
    finally:
      stage.end_all()
  files.write_json(workdir.chaos / COURSE, course)


class _Performance:
  """The time of a run: begins faults, ends them, writes them down."""

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

  def phases(self, plan: Sequence[Fault], seconds: float) -> Course:
    """Takes a run from its start to the quiet after the plan."""
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
    return Course(calm_s, began_s, ended_s, unready, self._late_turns)

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
    if KINDS[fault.kind].counters:
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

  def _write(self, fault: Fault, **found) -> None:
    with (self._run.workdir.chaos / FAULTS).open('a') as file:
      file.write(json.dumps({**dataclasses.asdict(fault), **found}) + '\n')
