# SPDX-License-Identifier: Apache-2.0
"""Processes of one run in a folder of their own: followed, and always ended."""

import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from diloco.metrics import names
from diloco.metrics.jsonl import Tail
from diloco.metrics.workdir import Workdir
from launch.program import Role
from launch.session import Interrupted
from launch.supervisor import Supervisor

LOOK_S = 0.1
FOLDER = 'netbench-'  # Then the pid of its owner, in the folder for these.
LOG_TAIL = 1500  # Characters of a log that a failure shows.


class SystemFailed(Exception):
  """A system could not be measured; the message says why."""


class Followed:
  """The steps and rounds of running processes, read from their files."""

  def __init__(self, members: Sequence[str], workdir: Workdir):
    self._tails = {m: Tail(workdir.metrics(m)) for m in members}
    self._tape = Tail(workdir.tape)
    self.steps_s: dict[str, list[float]] = {m: [] for m in members}
    self.rounds = 0

  def look(self) -> None:
    for member, tail in self._tails.items():
      self.steps_s[member] += [r[names.STEP_TIME] for r in tail.new_records()]
    self.rounds += sum(r['kind'] == 'Publish' for r in self._tape.new_records())

  def counts(self) -> dict[str, int]:
    """Returns how many steps each member has made."""
    return {member: len(found) for member, found in self.steps_s.items()}


class ProcessRun:
  """A run's processes; a `with` block ends them.

  Args:
    members: the names of all whose steps are followed, also of later ones.
    received: signals that ask to stop.

  Attributes:
    workdir: the run's folder, which is removed at the end.
  """

  def __init__(self, members: Sequence[str], received: list[int]):
    self._received = received
    prefix = f'{FOLDER}{os.getpid()}-'
    self._folder = pathlib.Path(tempfile.mkdtemp(prefix=prefix))
    self.workdir = Workdir(self._folder / 'run')
    for path in (self.workdir.root, self.workdir.metrics('x').parent):
      path.mkdir(exist_ok=True)
    self._seen = Followed(members, self.workdir)

  def _supervise(
    self, roles: Sequence[Role], environment: Mapping[str, str]
  ) -> None:
    """Sets the processes, which the first look starts."""
    self._supervisor = Supervisor(
      roles,
      log=self.workdir.log,
      environment=os.environ | environment,
      restarts_max=0,
      restart_delay_s=0.0,
      announce=lambda event: None,
      hurry=lambda: bool(self._received),
    )

  def __enter__(self) -> 'ProcessRun':
    return self

  def __exit__(self, *exception) -> None:
    self._supervisor.stop()
    shutil.rmtree(self._folder, ignore_errors=True)

  def _made(self) -> dict[str, int]:
    """Returns how many steps each member has made."""
    self._seen.look()
    return self._seen.counts()

  def _until(self, holds: Callable[[], bool], limit_s: float) -> None:
    """Polls until `holds()`; raises for a signal, a death or the limit."""
    over_s = time.monotonic() + limit_s
    while not holds():
      self._supervisor.poll()
      if self._received:
        raise Interrupted(self._received[0])
      if failure := self._supervisor.failure:
        raise SystemFailed(
          f'{failure}{self._log_tail(failure.partition(" ")[0])}'
        )
      if time.monotonic() > over_s:
        made = ', '.join(f'{m} {n}' for m, n in self._seen.counts().items())
        raise SystemFailed(f'too slow: after {limit_s:.0f} s, steps: {made}')
      time.sleep(LOOK_S)

  def _log_tail(self, process: str) -> str:
    path = self.workdir.log(process)
    if not path.exists():
      return ''
    return f'; its log ends:\n{path.read_text(errors="replace")[-LOG_TAIL:]}'


def remove_left() -> None:
  """Removes the folders of commands that were killed."""
  for folder in pathlib.Path(tempfile.gettempdir()).glob(f'{FOLDER}*-*'):
    owner = folder.name.removeprefix(FOLDER).partition('-')[0]
    if owner.isdecimal() and not pathlib.Path('/proc', owner).exists():
      shutil.rmtree(folder, ignore_errors=True)
