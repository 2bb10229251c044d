# SPDX-License-Identifier: Apache-2.0
"""Learners that join or leave a local run while it goes on, as they are told.

A command leaves a request in the run's folder; the launcher that runs there
does what it asks for, and removes it.
"""

import dataclasses
import fcntl
import json
import time
from collections.abc import Callable

from diloco.config import run_config
from diloco.config.run_config import RunConfig
from diloco.config.sections import ConfigError
from diloco.metrics import files
from diloco.metrics.workdir import Workdir, learner_name
from launch.exit_policy import RUNNING, WAITING
from launch.program import Program
from launch.supervisor import Supervisor

ANSWER_S = 20.0  # A launcher looks several times a second.
LOOK_S = 0.05
NO_PLACE = (
  'all accelerators are dealt to learners of the configuration; start it by '
  'hand: docs/one_machine.md'
)
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Request:
  """A request to the launcher: a learner joins, or else it leaves."""

  learner: int
  joins: bool


# The command.


def ask(config: RunConfig, workdir: Workdir, request: Request, say: Say) -> int:
  """Has the launcher of a run start a learner, or stop it.

  Returns:
    0; 1 if the launcher does not do it.

  Raises:
    ConfigError: no such run goes on there, or not with such a learner.
  """
  run_config.check_learner(config, request.learner)
  if not _is_held(workdir):
    raise ConfigError(
      [f'--workdir={workdir.root}: no launcher is running there']
    )
  try:
    theirs = run_config.restore(json.loads(workdir.config.read_text()))
    there = _pids(workdir)
  except (OSError, ValueError) as error:
    raise ConfigError(
      [f'--workdir={workdir.root}: the run there has not started: {error}']
    ) from None
  agreed = (run_config.agreement(each) for each in (config, theirs))
  if differing := run_config.differences(*agreed):
    raise ConfigError([f'--workdir={workdir.root}: that run has {differing}'])
  name = learner_name(request.learner)
  if (name in there) == request.joins:
    how = 'is running already' if request.joins else 'is not running'
    raise ConfigError([f'--learner={request.learner}: {how}'])
  path = workdir.requests / f'{name}.json'
  path.parent.mkdir(exist_ok=True)
  files.write_json(path, request)
  until_s = time.monotonic() + ANSWER_S
  while path.exists() or (request.joins and name not in _pids(workdir)):
    if time.monotonic() > until_s:
      path.unlink(missing_ok=True)
      say(f'{name}: nothing came of it; see what the launcher says')
      return 1
    time.sleep(LOOK_S)
  done = f'started, pid {_pids(workdir)[name]}' if request.joins else 'leaves'
  say(f'{name}: {done}')
  return 0


def _is_held(workdir: Workdir) -> bool:
  """Returns True if a launcher has locked the folder."""
  try:
    with workdir.lock.open('rb') as lock:
      fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except BlockingIOError:
    return True
  except OSError:
    return False
  return False


def _pids(workdir: Workdir) -> dict[str, int]:
  """Returns the processes that the launcher has started, by name."""
  return json.loads(workdir.pids.read_text())['processes']


# The launcher.


def forget(workdir: Workdir) -> None:
  """Removes what was asked of an earlier launcher."""
  for path in workdir.requests.glob('*.json'):
    path.unlink(missing_ok=True)


def perform(
  workdir: Workdir, program: Program, running: Supervisor, say: Say
) -> None:
  """Does what is asked for."""
  for path in sorted(workdir.requests.glob('*.json')):
    try:
      request = files.read_json(path, Request)
    except files.MalformedFile as error:
      say(f'not performed: {error}')
      request = None
    if request is not None and (why := _perform(request, program, running)):
      say(f'{learner_name(request.learner)}: {why}')
    path.unlink(missing_ok=True)


def _perform(
  request: Request, program: Program, running: Supervisor
) -> str | None:
  """Performs it; returns why not."""
  name = learner_name(request.learner)
  states = {each.name: each.state for each in running.states()}
  there = states.get(name) in (RUNNING, WAITING)
  if there == request.joins:
    return 'is there already' if there else 'is not there'
  if not request.joins:
    running.dismiss(name, 'SIGTERM, it was removed')
    return None
  roles = {role.name: role for role in program.roles}
  if name not in roles and program.newcomer is None:
    return NO_PLACE
  running.add(roles.get(name) or program.newcomer(request.learner))
  return None
