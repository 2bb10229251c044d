# SPDX-License-Identifier: Apache-2.0
"""Prints what a launch would do, without starting or querying anything."""

import shlex
from collections.abc import Callable, Sequence

from launch.backends import queued_resources as backends_queued_resources
from launch.backends.queued_resources import Cloud
from launch.backends.startup import startup_script
from launch.job import JobSpec, only
from launch.program import Program

SYNCER_IP = 'SYNCER_IP'  # Known once its machine is there.
COORDINATOR = '127.0.0.1:PORT'  # Another one at each start.


def shown(say: Callable[[str], None]) -> Callable[[Sequence[str], str], str]:
  """Takes the place of running a command: prints it and its input."""

  def act(argv: Sequence[str], text: str) -> str:
    say(f'# {shlex.join(argv)}')
    if text:
      say(text.rstrip('\n'))
    return ''

  return act


def local(parts: Program, say: Callable[[str], None]) -> None:
  """The processes of a local run."""
  for name, value in parts.environment:
    say(f'export {name}={shlex.quote(value)}')
  for role in (*parts.roles, parts.evaluate):
    for host in range(role.hosts):
      added = role.variables(host).items()
      own = [f'{name}={shlex.quote(value)}' for name, value in added]
      say(f'# {role.process(host)}')
      command = shlex.join(role.command(host, COORDINATOR))
      say(' '.join([*own, command]))


def queued_resources(
  whole: JobSpec, cloud: Cloud, say: Callable[[str], None], with_roles: bool
) -> None:
  """The commands of a launch on TPU VMs and their startup scripts.

  Args:
    with_roles: False: only what is done each minute.
  """
  if with_roles:
    for role in (whole.syncer, *whole.shards):
      lead = f'{SYNCER_IP}:{whole.port}' if role in whole.shards else ''
      script = startup_script(whole, role, cloud.project, lead, 1)
      name = f'{whole.role_name(role)}.sh'
      _file(name, script, say)
      make = backends_queued_resources.create_machine
      say(shlex.join(make(whole, role, cloud, name)))
    for each in whole.first_learners:
      queued_learner(whole, each.learner, cloud, say)
  say('# Each minute; what is SUSPENDED or FAILED is deleted and created:')
  say(shlex.join(backends_queued_resources.list_learners(cloud)))


def queued_learner(
  whole: JobSpec, learner: int, cloud: Cloud, say: Callable[[str], None]
) -> None:
  """Prints the creation of one slice."""
  role = only(whole, learner)
  syncer = f'{SYNCER_IP}:{whole.port}'
  script = startup_script(whole, role, cloud.project, syncer, 1)
  name = f'{whole.role_name(role)}.sh'
  _file(name, script, say)
  say(
    shlex.join(
      backends_queued_resources.create_learner(whole, role, cloud, name, 1)
    )
  )


def queued_removal(
  whole: JobSpec, learner: int, cloud: Cloud, say: Callable[[str], None]
) -> None:
  """Prints the deletion of one slice."""
  only(whole, learner)
  say(
    shlex.join(backends_queued_resources.delete_learner(whole, learner, cloud))
  )


def _file(name: str, text: str, say: Callable[[str], None]) -> None:
  say(f"cat >{name} <<'END_OF_SCRIPT'\n{text}END_OF_SCRIPT")
