# SPDX-License-Identifier: Apache-2.0
"""Requests slices again that were taken away, until the run is over.

The service does not announce that it has suspended a slice, so this checks once
a minute. It only recreates slices that it has seen before: a slice that a user
added is watched from then on, one that a user deleted is not recreated.
"""

import dataclasses
import pathlib
import re
import tempfile
from collections.abc import Callable, Collection

from launch.backends import queued_resources
from launch.backends.commands import CommandFailed, Run
from launch.backends.queued_resources import Cloud, QueuedSlice
from launch.backends.startup import startup_script
from launch.job import JobSpec, Task, only

LOOK_EVERY_S = 60.0
BACKOFF_MIN_S = 60.0
BACKOFF_MAX_S = 1800.0

GONE = ('SUSPENDED', 'FAILED')  # Deleted, and asked for again.
# Of gRPC and HTTP, and of a network that is away: they pass.
PASSING = re.compile(
  r'\b(RESOURCE_EXHAUSTED|UNAVAILABLE|DEADLINE_EXCEEDED|INTERNAL|ABORTED'
  r'|429|50[0234]|[Cc]onnection|timed out)\b'
)
EXISTS = 'ALREADY_EXISTS'  # Another launcher was faster.


@dataclasses.dataclass
class _Wanted:
  """A learner that has no slice now and is to get one."""

  attempt: int
  due_s: float


class Provisioner:
  """The learners' slices of one run. Time is an argument."""

  def __init__(
    self,
    whole: JobSpec,
    cloud: Cloud,
    syncer: str,
    run: Run,
    say: Callable[[str], None],
  ):
    """Stores the arguments; starts nothing.

    Args:
      syncer: 'host:port' of the syncer.
    """
    self._whole = whole
    self._cloud = cloud
    self._syncer = syncer
    self._run = run
    self._say = say
    self._wanted: dict[int, _Wanted] = {}
    self._failures: dict[int, int] = {}  # In a row.
    self._states: dict[int, str] = {}

  def want(self, learners: Collection[int], now_s: float) -> None:
    """These are to have a slice, unless they have one."""
    held = {each.learner for each in self._look()}
    for learner in sorted(set(learners) - held):
      self._wanted[learner] = _Wanted(1, now_s)

  def step(self, now_s: float) -> None:
    """Looks once; gives back what is gone, asks for what is due.

    Raises:
      CommandFailed: and it would again.
    """
    try:
      found = self._look()
    except CommandFailed as error:
      self._unless_passing(error)
      return
    for each in found:
      self._notice(each, now_s)
    held = {each.learner for each in found}
    for learner, wanted in sorted(self._wanted.items()):
      if learner not in held and now_s >= wanted.due_s:
        self._ask(learner, wanted, now_s)

  def syncer_exit(self) -> int | None:
    """Exit code with which the syncer has ended for good; None: it has not."""
    try:
      return queued_resources.syncer_exit(self._whole, self._cloud, self._run)
    except CommandFailed as error:
      self._unless_passing(error)
      return None

  def remove_all(self) -> None:
    """Gives back all slices and wants none."""
    self._wanted.clear()
    for each in self._look():
      if each.state != 'DELETING':
        self._delete(each.learner)

  def _look(self) -> list[QueuedSlice]:
    listed = self._run(queued_resources.list_learners(self._cloud))
    return queued_resources.slices(self._whole, listed)

  def _notice(self, each: QueuedSlice, now_s: float) -> None:
    learner = each.learner
    if self._states.get(learner) != each.state:
      self._say(f'learner-{learner}: {each.state}, attempt {each.attempt}')
    self._states[learner] = each.state
    if each.state == 'ACTIVE':
      self._failures.pop(learner, None)
      self._wanted.pop(learner, None)
    elif each.state in GONE:
      self._delete(learner)  # Once more, where the last time did not do.
      if learner not in self._wanted:
        # A preemption does not count as a failure; a slice that never came up
        # does.
        wait_s = self._failed(learner) if each.state == 'FAILED' else 0.0
        self._wanted[learner] = _Wanted(each.attempt + 1, now_s + wait_s)

  def _ask(self, learner: int, wanted: _Wanted, now_s: float) -> None:
    try:
      create(
        self._whole,
        learner,
        self._cloud,
        self._syncer,
        wanted.attempt,
        self._run,
      )
    except CommandFailed as error:
      if EXISTS in error.stderr:
        del self._wanted[learner]
        return
      self._unless_passing(error)
      wanted.due_s = now_s + self._failed(learner)
      self._say(f'learner-{learner}: again in {wanted.due_s - now_s:.0f} s')
    else:
      self._say(f'learner-{learner}: asked for, attempt {wanted.attempt}')
      del self._wanted[learner]

  def _delete(self, learner: int) -> None:
    try:
      self._run(
        queued_resources.delete_learner(self._whole, learner, self._cloud)
      )
    except CommandFailed as error:
      if not any(word in error.stderr for word in queued_resources.ABSENT):
        self._unless_passing(error)  # It is seen again, and deleted then.

  def _failed(self, learner: int) -> float:
    """Counts a failure; how long to wait before the next attempt."""
    count = self._failures.get(learner, 0) + 1
    self._failures[learner] = count
    return min(BACKOFF_MIN_S * 2 ** (count - 1), BACKOFF_MAX_S)

  def _unless_passing(self, error: CommandFailed) -> None:
    if not PASSING.search(error.stderr):
      raise error
    self._say(str(error))


def create(
  whole: JobSpec,
  learner: int,
  cloud: Cloud,
  syncer: str,
  attempt: int,
  run: Run,
) -> None:
  """Asks for one learner's slice.

  Raises:
    CommandFailed: it was refused.
  """
  role = only(whole, learner)
  script = startup_script(whole, role, cloud.project, syncer, attempt)
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'startup.sh'
    path.write_text(script)
    run(queued_resources.create_learner(whole, role, cloud, str(path), attempt))


def create_machine(
  whole: JobSpec, role: Task, cloud: Cloud, run: Run, syncer: str = ''
) -> None:
  """Makes the machine of the syncer, or of a shard.

  Args:
    syncer: 'host:port' of the syncer, for a shard.
  """
  script = startup_script(whole, role, cloud.project, syncer, 1)
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'startup.sh'
    path.write_text(script)
    run(queued_resources.create_machine(whole, role, cloud, str(path)))
