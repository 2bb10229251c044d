# SPDX-License-Identifier: Apache-2.0
"""What a launch would do, as text: nothing is started and nothing is asked."""

import pathlib
import shlex
from collections.abc import Callable, Sequence

from absl import flags as absl_flags

from diloco import flags
from diloco.config import RunConfig
from diloco.config_values import ConfigError
from diloco.metrics.workdir import Workdir
from launch import queued_resources as queued
from launch.launch import Launch, only
from launch.program import program
from launch.queued_resources import Cloud
from launch.startup import startup_script

SYNCER_IP = 'SYNCER_IP'  # Known once its machine is there.


def shown(say: Callable[[str], None]) -> Callable[[Sequence[str], str], str]:
  """Takes the place of running a command: prints it and its input."""

  def act(argv: Sequence[str], text: str) -> str:
    say(f'# {shlex.join(argv)}')
    if text:
      say(text.rstrip('\n'))
    return ''

  return act


def local(config: RunConfig, say: Callable[[str], None]) -> int:
  """The processes of a local run, by the parsed flags."""
  given = absl_flags.FLAGS
  if not given.workdir:
    flags.exit_config(
      ConfigError(['--workdir: is missing, such as runs/first'])
    )
  parts = program(
    config,
    flags.arguments(),
    Workdir(pathlib.Path(given.workdir)),
    f'{config.transport.host}:{config.transport.port}',
    flags.access_arguments(),
  )
  for name, value in parts.environment:
    say(f'export {name}={shlex.quote(value)}')
  for role in (*parts.roles, parts.evaluate):
    say(f'# {role.name}')
    say(shlex.join(role.argv))
  return 0


def queued_resources(
  whole: Launch, cloud: Cloud, say: Callable[[str], None], with_roles: bool
) -> None:
  """The commands of a launch on TPU VMs and their startup scripts.

  Args:
    whole: the run.
    cloud: where.
    say: takes the text.
    with_roles: False: only what is done each minute.
  """
  if with_roles:
    script = startup_script(whole, whole.syncer, cloud.project, '', 1)
    name = f'{whole.role_name(whole.syncer)}.sh'
    _file(name, script, say)
    say(shlex.join(queued.create_syncer(whole, cloud, name)))
    for each in whole.first_learners:
      queued_learner(whole, each.learner, cloud, say)
  say('# Each minute; what is SUSPENDED or FAILED is deleted and created:')
  say(shlex.join(queued.list_learners(cloud)))


def queued_learner(
  whole: Launch, learner: int, cloud: Cloud, say: Callable[[str], None]
) -> None:
  """One slice."""
  role = only(whole, learner)
  syncer = f'{SYNCER_IP}:{whole.port}'
  script = startup_script(whole, role, cloud.project, syncer, 1)
  name = f'{whole.role_name(role)}.sh'
  _file(name, script, say)
  say(shlex.join(queued.create_learner(whole, role, cloud, name, 1)))


def queued_removal(
  whole: Launch, learner: int, cloud: Cloud, say: Callable[[str], None]
) -> None:
  """One slice that is given back."""
  only(whole, learner)
  say(shlex.join(queued.delete_learner(whole, learner, cloud)))


def _file(name: str, text: str, say: Callable[[str], None]) -> None:
  say(f"cat >{name} <<'END_OF_SCRIPT'\n{text}END_OF_SCRIPT")
